// Python's arrays as memory: where they lie, of which type, with which strides. Nothing is copied and nothing is written.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "layout.hpp"

namespace cowalk {

// Keeps NumPy's buffers until the measuring is done.
class Buffers {
  public:
    Buffers() = default;
    Buffers(const Buffers &) = delete;
    Buffers &operator=(const Buffers &) = delete;
    ~Buffers() {
        for (Py_buffer &buffer : held_) PyBuffer_Release(&buffer);
    }
    void view(PyObject *array, int code, View &view);

  private:
    std::vector<Py_buffer> held_;
};

// What Python tells once: NumPy's array type and the codes of its dtypes, torch's plain tensor types and how to see them.
struct Known {
    PyObject *ndarray = nullptr;  // the type
    PyObject *codes = nullptr;    // {dtype: code}
    PyObject *tensors = nullptr;  // a tuple of types
    PyObject *exchange = nullptr; // torch's capsule with DLPack's C functions
};
extern Known known;

// Sees an array in memory; false if it is of a kind that Python has to prepare first. It sees a NumPy array of a known dtype,
// a plain torch tensor on the CPU, and a description: (address, code, shape, strides or None). Throws PythonError.
bool see(PyObject *object, View &view, Buffers &buffers);

}  // namespace cowalk
