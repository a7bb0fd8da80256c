// The extension module cowalk._native. The walk's entry points are plain CPython functions (a nanobind call costs more than
// the walk of a small tree); nanobind makes the module.
#include <nanobind/nanobind.h>

#include "measuring.hpp"
#include "plan.hpp"

namespace {

using cowalk::PythonError;

PyObject *forget(PyObject *, PyObject *) {
    cowalk::forget_kinds();
    Py_RETURN_NONE;
}

template <auto function> PyCFunction fast() {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef functions[] = {
    {"setup", cowalk::setup, METH_O, "Take the Python objects that the walk needs."},
    {"forget", forget, METH_NOARGS, "Forget which type has which kind."},
    {"fmap", fast<&cowalk::fmap>(), METH_FASTCALL, "fmap(f, trees, where, missing, strict, ties, with_path, outputs, structure)"},
    {"walk", fast<&cowalk::walk>(), METH_FASTCALL, "walk(trees, where, missing, strict, ties, holders)"},
    {"differences", fast<&cowalk::differences>(), METH_FASTCALL, "differences(trees, where)"},
    {"measure", fast<&cowalk::measure_leaves>(), METH_FASTCALL, "measure(leaves, matrix, threads, level, histograms)"},
    {"add", fast<&cowalk::add_gradients>(), METH_FASTCALL, "add(addends, factor, norms, threads, level)"},
    {"know_arrays", fast<&cowalk::know_arrays>(), METH_FASTCALL, "know_arrays(ndarray, codes, tensors, exchange)"},
    {"instruction_sets", cowalk::instruction_sets, METH_NOARGS, "The names of the kernels that can run here."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

NB_MODULE(_native, module) {
    if (PyModule_AddFunctions(module.ptr(), functions) < 0 || !cowalk::add_walk_type(module.ptr()))
        nanobind::raise_python_error();
}
