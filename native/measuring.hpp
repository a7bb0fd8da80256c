// The entry points of measuring, for module.cpp.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace cowalk {

PyObject *measure_leaves(PyObject *, PyObject *const *arguments, Py_ssize_t count);
PyObject *know_arrays(PyObject *, PyObject *const *arguments, Py_ssize_t count);
PyObject *instruction_sets(PyObject *, PyObject *);

}  // namespace cowalk
