// The entry points of measuring: from Python's leaves to a matrix.
#include "measuring.hpp"

#include <algorithm>

#include "arrays.hpp"
#include "layout.hpp"
#include "refs.hpp"

namespace cowalk {

std::vector<Level> levels() {
    std::vector<Level> found = {{"baseline", kernel_baseline, add_kernel_baseline}};
#ifdef COWALK_X86_LEVELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        found.push_back({"avx2", kernel_avx2, add_kernel_avx2});
    if (found.size() == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
        found.push_back({"avx512", kernel_avx512, add_kernel_avx512});
#endif
    return found;
}

namespace {

double number(PyObject *tuple, Py_ssize_t i) {
    const double value = PyFloat_AsDouble(PyTuple_GET_ITEM(tuple, i));
    if (value == -1.0 && PyErr_Occurred()) throw PythonError{};
    return value;
}

[[noreturn]] void refuse(const char *message) {
    PyErr_SetString(PyExc_ValueError, message);
    throw PythonError{};
}

struct Work {
    std::vector<Leaf> leaves;
    std::vector<Rows> rows;
    std::vector<std::int64_t> list;  // of shapes and strides
    View views[OPERANDS];
    Buffers buffers;
    bool all_seen = true;  // and of one shape a leaf

    void add(PyObject *operands);
    void finish();
};

bool same_shape(const View &one, const View &other) {
    return one.axes == other.axes && std::equal(one.shape, one.shape + one.axes, other.shape);
}

void Work::add(PyObject *operands) {
    if (!PyTuple_Check(operands) || PyTuple_GET_SIZE(operands) != OPERANDS + 1) refuse("a leaf is a tuple of six");
    Leaf &leaf = leaves.emplace_back();
    int first = -1;
    for (int k = 0; k < OPERANDS; ++k) {
        PyObject *object = PyTuple_GET_ITEM(operands, k);
        if (object == Py_None) continue;
        View &view = views[k];
        view.array = Array();
        if (!see(object, view, buffers) || (first >= 0 && !same_shape(views[first], view))) {
            all_seen = false;
            return;
        }
        if (first < 0) first = k;
        leaf.arrays[k] = view.array;
        if (k < 3 && view.axes >= 2) {
            rows.push_back({leaves.size() - 1, k, view.array, view.axes, list.size()});
            list.insert(list.end(), view.shape, view.shape + view.axes);
            list.insert(list.end(), view.strides, view.strides + view.axes);
        }
    }
    if (first != PARAMETER) refuse("a leaf has a parameter");
    PyObject *adam = PyTuple_GET_ITEM(operands, OPERANDS);
    if (adam != Py_None && leaf.arrays[GRADIENT].present() && leaf.arrays[SECOND_MOMENT].present()) {
        if (!PyTuple_Check(adam) || PyTuple_GET_SIZE(adam) != 4) refuse("Adam's settings are a tuple of four");
        leaf.has_adam = true;
        leaf.epsilon = number(adam, 0), leaf.m_scale = number(adam, 1), leaf.v_scale = number(adam, 2), leaf.lr = number(adam, 3);
    }
    lay_out(leaf, views, list);
}

void Work::finish() {  // now that the list grows no more
    for (Leaf &leaf : leaves) {
        leaf.shape = list.data() + leaf.place;
        for (int k = 0; k < OPERANDS; ++k) leaf.strides[k] = leaf.shape + (k + 1) * leaf.axes;
    }
    for (Rows &each : rows) {
        each.shape = list.data() + each.place;
        each.strides = each.shape + each.axes;
    }
}

Ref histogram(const Histogram &counts, int operand) {
    const std::vector<std::uint64_t> &mine = counts.counts[operand];
    Ref numbers = Ref::checked(PyTuple_New(static_cast<Py_ssize_t>(mine.size())));
    for (std::size_t i = 0; i < mine.size(); ++i)
        PyTuple_SET_ITEM(numbers.get(), i, Ref::checked(PyLong_FromUnsignedLongLong(mine[i])).release());
    return Ref::checked(Py_BuildValue("(iO)", mine.empty() ? 0 : counts.low[operand] + LEAST_POWER, numbers.get()));
}

class Output {
  public:
    Output(PyObject *matrix, std::size_t lines) {
        if (PyObject_GetBuffer(matrix, &buffer_, PyBUF_WRITABLE) < 0) throw PythonError{};
        fits_ = buffer_.len == static_cast<Py_ssize_t>(lines * sizeof(Line)) &&
                reinterpret_cast<std::uintptr_t>(buffer_.buf) % alignof(Line) == 0;
    }
    ~Output() { PyBuffer_Release(&buffer_); }
    Output(const Output &) = delete;
    Output &operator=(const Output &) = delete;
    Line *lines() const {
        if (!fits_) refuse("the matrix has one line of float64 a leaf");
        return static_cast<Line *>(buffer_.buf);
    }

  private:
    Py_buffer buffer_;
    bool fits_;
};

Ref measured(PyObject *leaves, PyObject *matrix, int threads, int level, bool with_histograms) {
    Work work;
    const Ref sequence = Ref::checked(PySequence_Fast(leaves, "leaves are a sequence"));
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence.get());
    work.leaves.reserve(count);
    for (Py_ssize_t i = 0; i < count && work.all_seen; ++i) work.add(PySequence_Fast_GET_ITEM(sequence.get(), i));
    if (!work.all_seen) return Ref::borrow(Py_False);
    work.finish();

    const std::vector<Level> kernels = levels();
    if (level < 0 || level >= static_cast<int>(kernels.size())) refuse("there is no such instruction set here");
    const Output output(matrix, work.leaves.size());
    Line *lines = output.lines();
    std::vector<Histogram> histograms(with_histograms ? work.leaves.size() : 0);
    bool no_memory = false;
    Py_BEGIN_ALLOW_THREADS
    try {
        measure(work.leaves, work.rows, kernels[level].kernel, threads, lines, with_histograms ? &histograms : nullptr);
    } catch (const std::bad_alloc &) {
        no_memory = true;
    }
    Py_END_ALLOW_THREADS
    if (no_memory) {
        PyErr_NoMemory();
        throw PythonError{};
    }
    if (!with_histograms) return Ref::borrow(Py_None);
    Ref found = Ref::checked(PyTuple_New(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        Ref three = Ref::checked(PyTuple_New(3));
        for (int k = 0; k < 3; ++k)
            PyTuple_SET_ITEM(three.get(), k,
                             (work.leaves[i].arrays[k].present() ? histogram(histograms[i], k) : Ref::borrow(Py_None)).release());
        PyTuple_SET_ITEM(found.get(), i, three.release());
    }
    return found;
}

}  // namespace

// measure(leaves, matrix, threads, level, histograms): fills the matrix. Returns False, having done nothing, if some array cannot
// be seen or the arrays of a leaf have several shapes; or else None, or a tuple with three histograms (low, counts) a leaf.
PyObject *measure_leaves(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "measure takes five arguments");
        return nullptr;
    }
    const long threads = PyLong_AsLong(arguments[2]), level = PyLong_AsLong(arguments[3]);
    const int histograms = PyObject_IsTrue(arguments[4]);
    if (PyErr_Occurred()) return nullptr;
    try {
        return measured(arguments[0], arguments[1], static_cast<int>(threads), static_cast<int>(level), histograms != 0).release();
    } catch (const PythonError &) {
        return nullptr;
    } catch (const std::bad_alloc &) {
        return PyErr_NoMemory();
    }
}

// know_arrays(ndarray, codes, tensors, exchange): what `see` needs; the last two may be None.
PyObject *know_arrays(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 4 || !PyDict_Check(arguments[1]) || !(arguments[2] == Py_None || PyTuple_Check(arguments[2]))) {
        PyErr_SetString(PyExc_TypeError, "know_arrays(ndarray, codes, tensors, exchange)");
        return nullptr;
    }
    PyObject **places[] = {&known.ndarray, &known.codes, &known.tensors, &known.exchange};
    for (int i = 0; i < 4; ++i) {
        PyObject *before = *places[i];
        *places[i] = arguments[i] == Py_None ? nullptr : Ref::borrow(arguments[i]).release();
        Py_XDECREF(before);
    }
    Py_RETURN_NONE;
}

PyObject *instruction_sets(PyObject *, PyObject *) {
    try {
        const std::vector<Level> found = levels();
        Ref names = Ref::checked(PyTuple_New(static_cast<Py_ssize_t>(found.size())));
        for (std::size_t i = 0; i < found.size(); ++i)
            PyTuple_SET_ITEM(names.get(), i, Ref::checked(PyUnicode_FromString(found[i].name)).release());
        return names.release();
    } catch (const PythonError &) {
        return nullptr;
    }
}

}  // namespace cowalk
