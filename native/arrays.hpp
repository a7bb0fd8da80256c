// Python's arrays as memory: where they lie, of which type, with which strides. Nothing is copied and nothing is written.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "layout.hpp"
#include "refs.hpp"

namespace cowalk {

// Keeps the memory of arrays until the measuring is done: NumPy's buffers, and torch's storages where another Python thread
// might give a tensor a new one meanwhile.
class Buffers {
  public:
    Buffers() : others_(PyThreadState_Next(PyInterpreterState_ThreadHead(PyInterpreterState_Get())) != nullptr) {}
    Buffers(const Buffers &) = delete;
    Buffers &operator=(const Buffers &) = delete;
    ~Buffers() {
        for (Py_buffer &buffer : held_) PyBuffer_Release(&buffer);
    }
    void view(PyObject *array, int code, View &view);
    PyObject *own(PyObject *tensor);  // the same memory under a tensor that nobody else has

  private:
    std::vector<Py_buffer> held_;
    std::vector<Ref> tensors_;
    bool others_;
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
