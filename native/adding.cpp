// Adding, from Python's addends to norms. All arrays are seen and checked before the first number is written.
#include "adding.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "arrays.hpp"
#include "measuring.hpp"
#include "refs.hpp"
#include "threads.hpp"

namespace cowalk {

double joined_norm(const double *norms, std::size_t count) {
    if (count == 1) return norms[0];
    double largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
        if (norms[i] != norms[i]) return norms[i];
        largest = std::max(largest, norms[i]);
    }
    if (largest == 0 || largest == HUGE_VAL) return largest;
    double squares = 0;
    for (std::size_t i = 0; i < count; ++i) squares += norms[i] / largest * (norms[i] / largest);
    return largest * std::sqrt(squares);
}

namespace {

template <class... Parts> [[noreturn]] void refuse(const char *message, Parts... parts) {
    PyErr_Format(PyExc_ValueError, message, parts...);
    throw PythonError{};
}

const char *name_of(Type type) {
    switch (type) {
    case Type::f16: return "float16";
    case Type::bf16: return "bfloat16";
    case Type::f32: return "float32";
    case Type::f64: return "float64";
    case Type::c64: return "complex64";
    case Type::c128: return "complex128";
    default: return "a float of 8 bits or fewer";
    }
}

std::int64_t size_of(Type type) {
    switch (type) {
    case Type::f16:
    case Type::bf16: return 2;
    case Type::f32: return 4;
    case Type::f64:
    case Type::c64: return 8;
    case Type::c128: return 16;
    default: return 1;
    }
}

bool holds_double(Type type) { return type == Type::f64 || type == Type::c128; }

bool is_dense(const View &view) {
    std::int64_t stride = size_of(view.array.type);
    for (int axis = view.axes; axis-- > 0; stride *= view.shape[axis])
        if (view.shape[axis] != 1 && view.strides[axis] != stride) return false;
    return true;
}

// A range of memory, and whose it is.
struct Memory {
    std::uintptr_t begin, end;
    Py_ssize_t addend;
};

Memory memory_of(const View &view, Py_ssize_t addend) {
    const auto data = reinterpret_cast<std::uintptr_t>(view.array.data);
    Memory memory = {data, data + size_of(view.array.type), addend};
    for (int axis = 0; axis < view.axes; ++axis) {
        const std::int64_t reach = (view.shape[axis] - 1) * view.strides[axis];
        (reach < 0 ? memory.begin : memory.end) += reach;
    }
    return memory;
}

struct Run {
    std::size_t addition;
    std::int64_t begin, end;
    double *norm;
};

class Work {
  public:
    bool take(PyObject *addend);  // false if an array cannot be seen
    void finish();                // once all are taken: checks what they share, before anything is written
    std::size_t size() const { return additions_.size(); }
    void add(AddKernel kernel, double factor, int threads, double *norms) const;

  private:
    std::vector<Addition> additions_;
    std::vector<std::int64_t> list_;  // of shapes and strides
    std::vector<Memory> written_, read_;
    Buffers buffers_;
    View sum_, compensation_, gradient_;

    void check_written(const View &view, PyObject *object, const char *role) const;
    void check_gradient() const;
    void lay_out(Addition &addition);
    Py_ssize_t current() const { return static_cast<Py_ssize_t>(additions_.size()); }
};

bool same_shape(const View &one, const View &other) {
    return one.axes == other.axes && std::equal(one.shape, one.shape + one.axes, other.shape);
}

void Work::check_written(const View &view, PyObject *object, const char *role) const {
    const Type type = view.array.type;
    if (type != Type::f32 && type != Type::f64 && type != Type::c64 && type != Type::c128)
        refuse("addend %zd: its %s is of %s; float32, float64, complex64 and complex128 can be added to", current(), role, name_of(type));
    if (!is_dense(view)) refuse("addend %zd: its %s does not lie in C order without gaps", current(), role);
    if (reinterpret_cast<std::uintptr_t>(view.array.data) % (holds_double(type) ? alignof(double) : alignof(float)) != 0)
        refuse("addend %zd: its %s does not begin at a multiple of its numbers' size", current(), role);
    if (reinterpret_cast<PyObject *>(Py_TYPE(object)) != known.ndarray) return;
    Py_buffer buffer;
    if (PyObject_GetBuffer(object, &buffer, PyBUF_STRIDES | PyBUF_WRITABLE) < 0) {
        PyErr_Clear();
        refuse("addend %zd: its %s is read-only", current(), role);
    }
    PyBuffer_Release(&buffer);
}

void Work::check_gradient() const {
    const Array &sum = sum_.array, &gradient = gradient_.array;
    if (!same_shape(sum_, gradient_)) refuse("addend %zd: its gradient and its sum have different shapes", current());
    if (gradient.complex() && !sum.complex())
        refuse("addend %zd: its gradient is of %s, its sum of %s, which is real", current(), name_of(gradient.type), name_of(sum.type));
    if (holds_double(gradient.type) && !holds_double(sum.type))
        refuse("addend %zd: its gradient is of %s, which is wider than its sum's %s", current(), name_of(gradient.type), name_of(sum.type));
}

void Work::lay_out(Addition &addition) {
    const View &view = gradient_;
    std::int64_t shape[MAX_AXES] = {1}, strides[MAX_AXES] = {size_of(view.array.type)};
    addition.n = 1;
    int axes = 0;
    for (int axis = 0; axis < view.axes; ++axis) {
        const std::int64_t length = view.shape[axis], stride = view.strides[axis];
        addition.n *= length;
        if (length == 1) continue;
        if (axes > 0 && strides[axes - 1] == stride * length) {
            shape[axes - 1] *= length;
            strides[axes - 1] = stride;
        } else {
            shape[axes] = length;
            strides[axes++] = stride;
        }
    }
    addition.axes = std::max(axes, 1);
    addition.place = list_.size();
    list_.insert(list_.end(), shape, shape + addition.axes);
    list_.insert(list_.end(), strides, strides + addition.axes);
}

bool Work::take(PyObject *addend) {
    if (!PyTuple_Check(addend) || PyTuple_GET_SIZE(addend) != 3) refuse("addend %zd is no tuple of three", current());
    PyObject *sum = PyTuple_GET_ITEM(addend, 0), *compensation = PyTuple_GET_ITEM(addend, 1), *gradient = PyTuple_GET_ITEM(addend, 2);
    const bool compensated = compensation != Py_None;
    if (!see(sum, sum_, buffers_) || (compensated && !see(compensation, compensation_, buffers_)) || !see(gradient, gradient_, buffers_))
        return false;
    check_written(sum_, sum, "sum");
    check_gradient();
    Addition addition;
    addition.type = sum_.array.type;
    addition.sum = const_cast<char *>(sum_.array.data);
    if (compensated) {
        check_written(compensation_, compensation, "compensation");
        if (compensation_.array.type != addition.type || !same_shape(sum_, compensation_))
            refuse("addend %zd: its compensation and its sum differ in type or shape", current());
        addition.compensation = const_cast<char *>(compensation_.array.data);
    }
    addition.gradient = gradient_.array;
    lay_out(addition);
    if (addition.n > 0) {
        written_.push_back(memory_of(sum_, current()));
        if (compensated) written_.push_back(memory_of(compensation_, current()));
        read_.push_back(memory_of(gradient_, current()));
    }
    additions_.push_back(addition);
    return true;
}

void Work::finish() {
    const auto before = [](const Memory &one, const Memory &other) { return one.begin < other.begin; };
    std::sort(written_.begin(), written_.end(), before);
    for (std::size_t i = 1; i < written_.size(); ++i)
        if (written_[i].begin < written_[i - 1].end)
            refuse("addends %zd and %zd: their sums or compensations overlap in memory", written_[i - 1].addend, written_[i].addend);
    for (const Memory &gradient : read_) {
        if (gradient.begin >= written_.back().end || gradient.end <= written_.front().begin) continue;
        // As none of them overlap, the last that begins before the gradient ends is the last that ends.
        const auto next = std::lower_bound(written_.begin(), written_.end(), Memory{gradient.end, 0, 0}, before);
        if (next != written_.begin() && next[-1].end > gradient.begin)
            refuse("addend %zd: its gradient overlaps the sum or the compensation of addend %zd in memory", gradient.addend, next[-1].addend);
    }
    for (Addition &addition : additions_) {  // now that the list grows no more
        addition.shape = list_.data() + addition.place;
        addition.strides = addition.shape + addition.axes;
    }
}

void Work::add(AddKernel kernel, double factor, int threads, double *norms) const {
    std::size_t cut = 0;
    std::int64_t elements = 0;
    for (const Addition &addition : additions_) {
        elements += addition.n;
        if (addition.n > RUN) cut += static_cast<std::size_t>((addition.n + RUN - 1) / RUN);
    }
    std::vector<double> partial(cut);
    std::vector<Run> runs;
    runs.reserve(cut + additions_.size());
    double *next = partial.data();
    for (std::size_t i = 0; i < additions_.size(); ++i) {
        const std::int64_t n = additions_[i].n;
        norms[i] = 0;
        if (n > RUN)
            for (std::int64_t begin = 0; begin < n; begin += RUN) runs.push_back({i, begin, std::min(begin + RUN, n), next++});
        else if (n > 0)
            runs.push_back({i, 0, n, &norms[i]});
    }
    share_out(runs.size(), threads_for(elements, threads), [&](std::size_t i) {
        const Run &run = runs[i];
        *run.norm = kernel(additions_[run.addition], factor, run.begin, run.end);
    });
    const PlainArithmetic mode;
    next = partial.data();
    for (std::size_t i = 0; i < additions_.size(); ++i) {
        if (additions_[i].n <= RUN) continue;
        const std::size_t count = static_cast<std::size_t>((additions_[i].n + RUN - 1) / RUN);
        norms[i] = joined_norm(next, count);
        next += count;
    }
}

// Where the norms go: an array of float64, one an addend.
class Output {
  public:
    explicit Output(PyObject *array) {
        if (PyObject_GetBuffer(array, &buffer_, PyBUF_WRITABLE) < 0) throw PythonError{};
    }
    ~Output() { PyBuffer_Release(&buffer_); }
    Output(const Output &) = delete;
    Output &operator=(const Output &) = delete;
    double *norms(std::size_t count) const {
        if (buffer_.len != static_cast<Py_ssize_t>(count * sizeof(double)) || reinterpret_cast<std::uintptr_t>(buffer_.buf) % alignof(double))
            refuse("the norms are one float64 an addend");
        return static_cast<double *>(buffer_.buf);
    }

  private:
    Py_buffer buffer_;
};

bool added(PyObject *addends, double factor, PyObject *array, int threads, int level) {
    Work work;
    const Ref sequence = Ref::checked(PySequence_Fast(addends, "addends are a sequence"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.get()); ++i)
        if (!work.take(PySequence_Fast_GET_ITEM(sequence.get(), i))) return false;
    work.finish();
    const std::vector<Level> kernels = levels();
    if (level < 0 || level >= static_cast<int>(kernels.size())) refuse("there is no such instruction set here");
    const Output output(array);
    double *norms = output.norms(work.size());
    bool no_memory = false;
    Py_BEGIN_ALLOW_THREADS
    try {
        work.add(kernels[level].add_kernel, factor, threads, norms);
    } catch (const std::bad_alloc &) {
        no_memory = true;
    }
    Py_END_ALLOW_THREADS
    if (no_memory) throw std::bad_alloc();
    return true;
}

}  // namespace

// add(addends, factor, norms, threads, level): adds, and fills `norms`. Returns whether it did: False, having done nothing, if
// some array cannot be seen.
PyObject *add_gradients(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "add takes five arguments");
        return nullptr;
    }
    const double factor = PyFloat_AsDouble(arguments[1]);
    const long threads = PyLong_AsLong(arguments[3]), level = PyLong_AsLong(arguments[4]);
    if (PyErr_Occurred()) return nullptr;
    try {
        return PyBool_FromLong(added(arguments[0], factor, arguments[2], static_cast<int>(threads), static_cast<int>(level)));
    } catch (const PythonError &) {
        return nullptr;
    } catch (const std::bad_alloc &) {
        return PyErr_NoMemory();
    }
}

}  // namespace cowalk
