// The entry points of measuring and adding, for module.cpp, and the instruction sets that both choose from.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "adding.hpp"
#include "measure.hpp"

namespace cowalk {

struct Level {
    const char *name;
    Kernel kernel;
    AddKernel add_kernel;
};

// The instruction sets that this build has and this processor knows, the least first.
std::vector<Level> levels();

PyObject *measure_leaves(PyObject *, PyObject *const *arguments, Py_ssize_t count);
PyObject *add_gradients(PyObject *, PyObject *const *arguments, Py_ssize_t count);
PyObject *know_arrays(PyObject *, PyObject *const *arguments, Py_ssize_t count);
PyObject *instruction_sets(PyObject *, PyObject *);

}  // namespace cowalk
