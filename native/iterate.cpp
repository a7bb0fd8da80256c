// walk: an iterator over the visits of a plan; and the bare list of differences.
#include <new>

#include "plan.hpp"

namespace cowalk {
namespace {

struct Walk {
    PyObject_HEAD
    Plan *plan;
    Options options;
    PyObject *where, *missing;  // owned: `options` only borrows them
    PyObject *pair, *values;    // the tuples given out last, owned: used again if nobody else holds them by now
    uint32_t next;
    bool holders;
    bool running;  // values are being made, by user code that must not come back here
};

// While a walk moves on, nobody else may move it: a callback, a finalizer, another thread.
class Running {
public:
    explicit Running(bool &flag) : flag_(flag) { flag_ = true; }
    ~Running() { flag_ = false; }
    Running(const Running &) = delete;
    Running &operator=(const Running &) = delete;

private:
    bool &flag_;
};

PyTypeObject *walk_type = nullptr;

int walk_traverse(PyObject *self, visitproc visit, void *arg) {
    auto *walk = reinterpret_cast<Walk *>(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(walk->where);
    Py_VISIT(walk->missing);
    Py_VISIT(walk->pair);
    Py_VISIT(walk->values);
    return walk->plan ? walk->plan->traverse(visit, arg) : 0;
}

int walk_clear(PyObject *self) {
    auto *walk = reinterpret_cast<Walk *>(self);
    PlanPtr(std::exchange(walk->plan, nullptr));
    Py_CLEAR(walk->where);
    Py_CLEAR(walk->missing);
    Py_CLEAR(walk->pair);
    Py_CLEAR(walk->values);
    return 0;
}

void walk_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    PyTypeObject *type = Py_TYPE(self);
    walk_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

Ref holder_of(const Plan &plan, const Visit &visit) {
    if (visit.boxes_count) return plan.boxes[visit.boxes_begin + visit.boxes_count - 1].box;
    if (visit.spot.parent != none) return plan.places[visit.spot.parent].node;
    return Ref::borrow(Py_None);
}

// A tuple with room for new items: the one given out last if nobody holds it any more (as zip does), else a new one,
// which is remembered in its place.
Ref fresh_tuple(PyObject *&last, Py_ssize_t size) {
#ifndef Py_GIL_DISABLED
    if (last && Py_REFCNT(last) == 1) {
        for (Py_ssize_t i = 0; i < size; ++i) {
            PyObject *old = PyTuple_GET_ITEM(last, i);
            PyTuple_SET_ITEM(last, i, nullptr);
            Py_XDECREF(old);
        }
        if (!PyObject_GC_IsTracked(last)) PyObject_GC_Track(last);  // the collector untracks tuples of plain values
        return Ref::borrow(last);
    }
#endif
    Ref made = Ref::checked(PyTuple_New(size));
    Py_XSETREF(last, Py_NewRef(made.get()));
    return made;
}

void fill_values(PyObject *tuple, const Plan &plan, uint32_t number, const Options &options) {
    std::vector<Value> made;
    if (options.missing == Missing::make) made = filled(plan, number, options);
    for (size_t j = 0; j < plan.trees; ++j)
        PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(j), Py_NewRef(made.empty() ? plan.value(number, j) : made[j].get()));
}

PyObject *walk_next(PyObject *self) {
    auto *walk = reinterpret_cast<Walk *>(self);
    if (walk->running) {
        PyErr_SetString(PyExc_ValueError, "this walk is moving on already");
        return nullptr;
    }
    if (!walk->plan) return nullptr;
    Running running(walk->running);
    const Plan &plan = *walk->plan;
    while (walk->next < plan.visits.size() && plan.visits[walk->next].skipped) ++walk->next;
    if (walk->next >= plan.visits.size()) {
        walk_clear(self);
        return nullptr;
    }
    try {
        uint32_t number = walk->next++;
        const Visit &visit = plan.visits[number];
        // The pair first: it lets go of the values given out last, so that their tuple is free to be used again.
        Ref made = fresh_tuple(walk->pair, walk->holders ? 4 : 2);
        Ref values = fresh_tuple(walk->values, static_cast<Py_ssize_t>(plan.trees));
        fill_values(values.get(), plan, number, walk->options);
        PyTuple_SET_ITEM(made.get(), 0, plan.path(visit.spot).release());
        PyTuple_SET_ITEM(made.get(), 1, values.release());
        if (walk->holders) {
            Ref key = visit.boxes_count || visit.spot.parent == none ? Ref::borrow(Py_None) : plan.key(visit.spot);
            PyTuple_SET_ITEM(made.get(), 2, holder_of(plan, visit).release());
            PyTuple_SET_ITEM(made.get(), 3, key.release());
        }
        return made.release();
    } catch (PythonError &) {
        return nullptr;
    } catch (std::bad_alloc &) {
        return PyErr_NoMemory();
    }
}

PyType_Slot walk_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void *>(walk_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(walk_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(walk_clear)},
    {Py_tp_iter, reinterpret_cast<void *>(PyObject_SelfIter)},
    {Py_tp_iternext, reinterpret_cast<void *>(walk_next)},
    {0, nullptr},
};

PyType_Spec walk_spec = {
    "cowalk._native.Walk",
    sizeof(Walk),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    walk_slots,
};

}  // namespace

bool add_walk_type(PyObject *module) {
    walk_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&walk_spec));
    return walk_type && PyModule_AddObjectRef(module, "Walk", reinterpret_cast<PyObject *>(walk_type)) == 0;
}

PyObject *walk(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 6 || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "walk(trees, where, missing, strict, ties, holders)");
        return nullptr;
    }
    try {
        PyObject *trees = args[0];
        Options options = read_options(args[1], args[2], args[3], args[4]);
        int holders = PyObject_IsTrue(args[5]);
        if (holders < 0) return nullptr;
        auto plan = align(&PyTuple_GET_ITEM(trees, 0), static_cast<size_t>(PyTuple_GET_SIZE(trees)), options);
        settle(*plan, options, trees);
        plan->steps.clear();  // nothing will be built
        plan->contents.clear();
        auto *made = reinterpret_cast<Walk *>(walk_type->tp_alloc(walk_type, 0));
        if (!made) return nullptr;
        made->plan = plan.release();
        made->options = options;
        made->where = Py_NewRef(args[1]);
        made->missing = Py_NewRef(args[2]);
        made->holders = holders;
        return reinterpret_cast<PyObject *>(made);
    } catch (PythonError &) {
        return nullptr;
    } catch (std::bad_alloc &) {
        return PyErr_NoMemory();
    }
}

PyObject *differences(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "differences(trees, where)");
        return nullptr;
    }
    try {
        Options options = read_options(args[1], Py_None, Py_True, Py_None);
        auto plan = align(&PyTuple_GET_ITEM(args[0], 0), static_cast<size_t>(PyTuple_GET_SIZE(args[0])), options);
        Ref raw = plan->raw_differences(true);
        Ref ties = Ref::checked(PyList_New(0));
        for (const Ref &error : plan->tie_errors)
            if (PyList_Append(ties.get(), error.get()) < 0) return nullptr;
        return PyTuple_Pack(2, raw.get(), ties.get());
    } catch (PythonError &) {
        return nullptr;
    } catch (std::bad_alloc &) {
        return PyErr_NoMemory();
    }
}

}  // namespace cowalk
