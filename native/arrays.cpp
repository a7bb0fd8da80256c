#include "arrays.hpp"

#include "dtypes.hpp"
#include "refs.hpp"

namespace cowalk {

Known known;

namespace {

// The part of DLPack 1.3 that is used: a tensor, and the table of C functions that a framework offers for its own.
struct DLTensor {
    void *data;
    std::int32_t device_type, device_id;
    std::int32_t ndim;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    std::int64_t *shape, *strides;
    std::uint64_t byte_offset;
};

struct DLExchange {
    std::uint32_t major, minor;
    DLExchange *previous;
    void *allocate, *to_managed, *from_managed;
    int (*see)(void *object, DLTensor *out);  // does not own what it shows; may be null
    void *stream;
};

constexpr std::int32_t DL_CPU = 1;

const DLExchange *exchange() {
    static const PyObject *asked = nullptr;
    static const DLExchange *found = nullptr;
    if (asked != known.exchange) {
        asked = known.exchange;
        found = nullptr;
        if (known.exchange && PyCapsule_CheckExact(known.exchange)) {
            found = static_cast<DLExchange *>(PyCapsule_GetPointer(known.exchange, PyCapsule_GetName(known.exchange)));
            while (found && found->major != 1) found = found->previous;
            if (!found) PyErr_Clear();
        }
    }
    return found && found->see ? found : nullptr;
}

// Whether a tensor's cells have to be read as their conjugates or negatives.
bool reads_otherwise(PyObject *tensor, bool complex) {
    static PyObject *names[] = {PyUnicode_InternFromString("is_neg"), PyUnicode_InternFromString("is_conj")};
    for (int i = 0; i <= complex; ++i)
        if (Ref::checked(PyObject_CallMethodNoArgs(tensor, names[i])).get() == Py_True) return true;
    return false;
}

void dense_strides(View &view, std::int64_t size) {
    for (int axis = view.axes; axis-- > 0; size *= view.shape[axis]) view.strides[axis] = size;
}

bool see_tensor(PyObject *tensor, View &view, Buffers &buffers) {
    const DLExchange *api = exchange();
    if (!api) return false;
    tensor = buffers.own(tensor);
    DLTensor seen;
    if (api->see(tensor, &seen) != 0) {  // sparse, meta, nested, quantised, wrapped: Python names it
        PyErr_Clear();
        return false;
    }
    int size = 0;
    if (seen.device_type != DL_CPU || seen.lanes != 1 || seen.ndim > MAX_AXES || !describe_type(type_code(seen.code, seen.bits), view.array, size))
        return false;
    if (reads_otherwise(tensor, view.array.complex())) return false;
    view.array.data = static_cast<const char *>(seen.data) + seen.byte_offset;
    view.axes = seen.ndim;
    std::int64_t n = 1;
    for (int axis = 0; axis < view.axes; ++axis) n *= view.shape[axis] = seen.shape[axis];
    if (seen.data == nullptr && n > 0) return false;
    if (!seen.strides) dense_strides(view, size);
    for (int axis = 0; seen.strides && axis < view.axes; ++axis) view.strides[axis] = seen.strides[axis] * size;
    return true;
}

[[noreturn]] void refuse(PyObject *error, const char *message) {
    PyErr_SetString(error, message);
    throw PythonError{};
}

int integers(PyObject *tuple, std::int64_t *into) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > MAX_AXES)
        refuse(PyExc_TypeError, "a description's shape and strides are tuples, of 64 numbers at most");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) into[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    if (PyErr_Occurred()) throw PythonError{};
    return static_cast<int>(PyTuple_GET_SIZE(tuple));
}

bool see_description(PyObject *tuple, View &view) {
    const void *data = PyLong_AsVoidPtr(PyTuple_GET_ITEM(tuple, 0));
    const long code = PyLong_AsLong(PyTuple_GET_ITEM(tuple, 1));
    PyObject *strides = PyTuple_GET_ITEM(tuple, 3);
    if (PyErr_Occurred()) throw PythonError{};
    int size = 0;
    if (!describe_type(static_cast<int>(code), view.array, size)) refuse(PyExc_ValueError, "a description of an unknown type");
    view.array.data = static_cast<const char *>(data);
    view.axes = integers(PyTuple_GET_ITEM(tuple, 2), view.shape);
    std::int64_t n = 1;
    for (int axis = 0; axis < view.axes; ++axis) n *= view.shape[axis];
    if (data == nullptr && n > 0) refuse(PyExc_ValueError, "an array without memory: its storage was freed, or it is a fake tensor");
    if (strides == Py_None) {
        dense_strides(view, size);
    } else if (integers(strides, view.strides) != view.axes) {
        refuse(PyExc_ValueError, "a description with too few strides");
    }
    return true;
}

}  // namespace

void Buffers::view(PyObject *array, int code, View &view) {
    Py_buffer buffer;
    // Without PyBUF_FORMAT: NumPy has no format for bfloat16 and its kin, and does not need one to show their memory.
    if (PyObject_GetBuffer(array, &buffer, PyBUF_STRIDES) < 0) throw PythonError{};
    held_.push_back(buffer);
    int size = 0;
    if (!describe_type(code, view.array, size) || size != buffer.itemsize || buffer.ndim > MAX_AXES)
        refuse(PyExc_ValueError, "a dtype with the code of another type");
    view.array.data = static_cast<const char *>(buffer.buf);
    view.axes = buffer.ndim;
    for (int axis = 0; axis < buffer.ndim; ++axis) view.shape[axis] = buffer.shape[axis], view.strides[axis] = buffer.strides[axis];
}

PyObject *Buffers::own(PyObject *tensor) {
    if (!others_) return tensor;
    static PyObject *name = PyUnicode_InternFromString("detach");
    tensors_.push_back(Ref::checked(PyObject_CallMethodNoArgs(tensor, name)));
    return tensors_.back().get();
}

bool see(PyObject *object, View &view, Buffers &buffers) {
    PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(object));
    if (known.tensors)
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(known.tensors); ++i)
            if (PyTuple_GET_ITEM(known.tensors, i) == type) return see_tensor(object, view, buffers);
    if (type == known.ndarray) {
        static PyObject *name = PyUnicode_InternFromString("dtype");
        const Ref dtype = Ref::checked(PyObject_GetAttr(object, name));
        PyObject *code = PyDict_GetItemWithError(known.codes, dtype.get());
        if (!code && PyErr_Occurred()) throw PythonError{};
        if (code) buffers.view(object, static_cast<int>(PyLong_AsLong(code)), view);
        return code != nullptr;
    }
    return PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 4 && see_description(object, view);
}

}  // namespace cowalk
