// fmap: f is applied to the visits of a plan, then the nodes are closed from the bottom up (reference.py, fmap and build).
#include <algorithm>
#include <unordered_map>

#include "plan.hpp"

namespace cowalk {
namespace {

// Building makes many containers and no garbage. Left on, the collector looks through them all again and again.
class CollectorPause {
public:
    CollectorPause() : was_on_(PyGC_Disable()) {}
    ~CollectorPause() {
        if (was_on_) PyGC_Enable();
    }
    CollectorPause(const CollectorPause &) = delete;
    CollectorPause &operator=(const CollectorPause &) = delete;

private:
    int was_on_;
};

class Builder {
public:
    // `tree` says which of f's outputs to build around.
    Builder(Plan &plan, size_t tree, bool structure)
        : plan_(plan), results_(plan.results.data() + tree * plan.visits.size()), stack_(plan.stack), structure_(structure) {}

    Ref build() {
        CollectorPause pause;
        for (const Step &step : plan_.steps) {
            switch (step.op) {
            case Op::visit:
                for (uint32_t i = step.number; i < step.number + step.count; ++i) push_result(i);
                break;
            case Op::keep: stack_.push_back(structure_ && step.number != none ? plan_.contents[step.number] : step.node); break;
            case Op::close_box:
                if (!structure_)
                    stack_.back() = Ref::checked(PyObject_CallFunctionObjArgs(step.kind->close.get(), step.node.get(),
                                                                              stack_.back().get(), nullptr));
                break;
            case Op::close: {
                Ref made = structure_ ? plain(step) : close(step);
                stack_.resize(stack_.size() - step.count);
                stack_.push_back(std::move(made));
                break;
            }
            }
        }
        if (!closed_.empty()) finish();
        Ref made = std::move(stack_.back());
        stack_.pop_back();
        return made;
    }

private:
    const Plan &plan_;
    Ref *results_;
    std::vector<Ref> &stack_;
    bool structure_;

    struct Shared {
        Ref node, made;
        std::vector<Ref> parts;
    };
    std::unordered_map<PyObject *, Shared> shared_;
    struct Closed {
        const Kind *kind;
        Ref pairs;
    };
    std::vector<Closed> closed_;

    void push_result(uint32_t number) {
        if (plan_.visits[number].tied)  // it may stand at other places too
            stack_.push_back(results_[number]);
        else
            stack_.push_back(std::move(results_[number]));
    }

    const Ref *parts(const Step &step) const { return stack_.data() + stack_.size() - step.count; }
    PyObject *node(const Step &step) const { return plan_.places[step.number].node.get(); }
    Ref key(const Step &step, uint32_t i) const {
        return child_key(step.kind, plan_.keys, plan_.places[step.number].keys, i);
    }

    Ref list(const Step &step) {
        Ref made = Ref::checked(PyList_New(step.count));
        for (uint32_t i = 0; i < step.count; ++i) PyList_SET_ITEM(made.get(), i, Ref(parts(step)[i]).release());
        return made;
    }

    Ref tuple(const Step &step, PyTypeObject *type) {
        Ref made = Ref::checked(type == &PyTuple_Type ? PyTuple_New(step.count) : type->tp_alloc(type, step.count));
        for (uint32_t i = 0; i < step.count; ++i) PyTuple_SET_ITEM(made.get(), i, Ref(parts(step)[i]).release());
        return made;
    }

    // A dict of the parts. The keys are the plan's, not those that the node may have by now: f is free to change it.
    Ref dict(const Step &step) {
        Ref made = Ref::checked(PyDict_New());
        set_items(made.get(), step);
        return made;
    }

    void set_items(PyObject *dict, const Step &step) {
        const Ref *values = parts(step);
        uint32_t keys = plan_.places[step.number].keys;
        for (uint32_t i = 0; i < step.count; ++i) {
            Ref made;  // only where the node stores no keys
            PyObject *name = keys != none ? plan_.keys[keys + i].get() : (made = key(step, i)).get();
            if (PyDict_SetItem(dict, name, values[i].get()) < 0) throw PythonError{};
        }
    }

    Ref plain(const Step &step) {
        switch (step.kind->plain) {
        case Plain::list: return list(step);
        case Plain::tuple: return tuple(step, &PyTuple_Type);
        case Plain::dict: break;
        }
        return dict(step);
    }

    Ref close(const Step &step) {
        const Kind *kind = step.kind;
        PyTypeObject *type = Py_TYPE(node(step));
        switch (kind->layout) {
        case Layout::dict: return dict(step);
        case Layout::list: return list(step);
        case Layout::tuple: return tuple(step, &PyTuple_Type);
        case Layout::namedtuple:
            if (type->tp_dictoffset == 0) return tuple(step, type);
            break;
        default: break;
        }
        if (kind->shared) {
            auto before = shared_.find(node(step));
            if (before != shared_.end() && same_parts(before->second.parts, step)) return before->second.made;
        }
        Ref children = Ref::checked(PyDict_New());
        set_items(children.get(), step);
        Ref made = Ref::checked(
            PyObject_CallFunctionObjArgs(kind->close.get(), node(step), children.get(), nullptr));
        if (kind->shared)
            shared_.try_emplace(node(step), Shared{Ref::borrow(node(step)), made, {parts(step), parts(step) + step.count}});
        if (kind->finish) remember_closed(kind, node(step), made.get());
        return made;
    }

    bool same_parts(const std::vector<Ref> &before, const Step &step) const {
        return before.size() == step.count &&
               std::equal(before.begin(), before.end(), parts(step), [](const Ref &a, const Ref &b) { return a.get() == b.get(); });
    }

    // Nodes are grouped by their kind's finish function, in the order in which the functions first came up.
    void remember_closed(const Kind *kind, PyObject *node, PyObject *made) {
        auto group = std::find_if(closed_.begin(), closed_.end(),
                                  [&](const Closed &c) { return c.kind->finish.get() == kind->finish.get(); });
        if (group == closed_.end()) {
            closed_.push_back({kind, Ref::checked(PyList_New(0))});
            group = closed_.end() - 1;
        }
        Ref pair = Ref::checked(PyTuple_Pack(2, node, made));
        if (PyList_Append(group->pairs.get(), pair.get()) < 0) throw PythonError{};
    }

    void finish() {
        Ref renewed = Ref::checked(PyDict_New());
        auto add = [&](PyObject *old, PyObject *made) {
            Ref id = Ref::checked(PyLong_FromVoidPtr(old));
            if (PyDict_SetItem(renewed.get(), id.get(), made) < 0) throw PythonError{};
        };
        for (auto &[old, shared] : shared_) add(old, shared.made.get());
        for (uint32_t i = 0; i < plan_.visits.size(); ++i)
            if (PyObject *tie = tie_of(i)) add(tie, results_[i].get());
        for (const Closed &closed : closed_)
            Ref::checked(PyObject_CallFunctionObjArgs(closed.kind->finish.get(), closed.pairs.get(), renewed.get(), nullptr));
    }

    // The object whose identity made a visit a tie.
    PyObject *tie_of(uint32_t number) const {
        const Visit &visit = plan_.visits[number];
        if (!visit.tied) return nullptr;
        for (uint32_t i = 0; i < visit.boxes_count; ++i)
            if (plan_.boxes[visit.boxes_begin + i].kind->ties) return plan_.boxes[visit.boxes_begin + i].box.get();
        return plan_.value(number, 0);
    }
};

// An exception of f gets a note that says at which leaf it happened.
void add_note(const Plan &plan, uint32_t visit) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return;
#if PY_VERSION_HEX >= 0x030C0000
    Ref error = Ref::steal(PyErr_GetRaisedException());
#else
    PyObject *type, *raised, *traceback;
    PyErr_Fetch(&type, &raised, &traceback);
    PyErr_NormalizeException(&type, &raised, &traceback);
    if (traceback) PyException_SetTraceback(raised, traceback);
    Ref error = Ref::steal(raised), type_ref = Ref::steal(type), traceback_ref = Ref::steal(traceback);
#endif
    Ref path = plan.path(plan.visits[visit].spot);
    Ref noted = Ref::steal(PyObject_CallFunctionObjArgs(runtime().note.get(), error.get(), path.get(), nullptr));
    if (!noted) PyErr_Clear();  // the exception itself matters more than its note
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error.release());
#else
    PyErr_Restore(type_ref.release(), error.release(), traceback_ref.release());
#endif
}

struct Call {
    PyObject *f;
    bool with_path;
    size_t outputs;
    bool structure;
};

Ref call(const Plan &plan, uint32_t number, const Options &options, const Call &how) {
    if (!how.with_path && options.missing != Missing::make) {
        auto *args = reinterpret_cast<PyObject *const *>(plan.values.data() + number * plan.trees);
        PyObject *made = PyObject_Vectorcall(how.f, args, plan.trees, nullptr);
        if (!made) add_note(plan, number);
        return Ref::checked(made);
    }
    try {
        std::vector<Value> values = filled(plan, number, options);
        if (how.with_path) values.insert(values.begin(), Value(plan.path(plan.visits[number].spot)));
        return Ref::checked(
            PyObject_Vectorcall(how.f, reinterpret_cast<PyObject *const *>(values.data()), values.size(), nullptr));
    } catch (PythonError &) {
        add_note(plan, number);
        throw;
    }
}

Ref rebox(const Plan &plan, const Visit &visit, Ref result) {
    for (uint32_t i = visit.boxes_count; i-- > 0;) {
        const Wrapped &wrapped = plan.boxes[visit.boxes_begin + i];
        result = Ref::checked(PyObject_CallFunctionObjArgs(wrapped.kind->close.get(), wrapped.box.get(), result.get(), nullptr));
    }
    return result;
}

void call_all(Plan &plan, const Options &options, const Call &how) {
    size_t count = plan.visits.size();
    plan.results.resize(count * how.outputs);
    for (uint32_t i = 0; i < count; ++i) {
        const Visit &visit = plan.visits[i];
        if (visit.skipped) {
            for (size_t k = 0; k < how.outputs; ++k)
                plan.results[k * count + i] = Ref::borrow(how.structure ? Py_None : plan.kept(i));
            continue;
        }
        Ref made = call(plan, i, options, how);
        bool box = visit.boxes_count && !how.structure;
        if (how.outputs == 1) {
            plan.results[i] = box ? rebox(plan, visit, std::move(made)) : std::move(made);
            continue;
        }
        if (!PyTuple_Check(made.get()) || PyTuple_GET_SIZE(made.get()) != static_cast<Py_ssize_t>(how.outputs)) {
            Ref path = plan.path(visit.spot);
            Ref error = Ref::checked(PyObject_CallFunction(runtime().wrong_outputs.get(), "OnO", made.get(),
                                                           static_cast<Py_ssize_t>(how.outputs), path.get()));
            PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error.get())), error.get());
            throw PythonError{};
        }
        for (size_t k = 0; k < how.outputs; ++k) {
            Ref part = Ref::borrow(PyTuple_GET_ITEM(made.get(), static_cast<Py_ssize_t>(k)));
            plan.results[k * count + i] = box ? rebox(plan, visit, std::move(part)) : std::move(part);
        }
    }
}

}  // namespace

PyObject *fmap(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 9 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "fmap(f, trees, where, missing, strict, ties, with_path, outputs, structure)");
        return nullptr;
    }
    try {
        PyObject *trees = args[1];
        Options options = read_options(args[2], args[3], args[4], args[5]);
        size_t outputs = PyLong_AsSize_t(args[7]);
        if (PyErr_Occurred()) return nullptr;
        int with_path = PyObject_IsTrue(args[6]), structure = PyObject_IsTrue(args[8]);
        if (with_path < 0 || structure < 0) return nullptr;
        Call how{args[0], with_path != 0, outputs, structure != 0};
        auto plan = align(&PyTuple_GET_ITEM(trees, 0), static_cast<size_t>(PyTuple_GET_SIZE(trees)), options);
        settle(*plan, options, trees);
        call_all(*plan, options, how);
        if (outputs == 1) return Builder(*plan, 0, how.structure).build().release();
        Ref built = Ref::checked(PyTuple_New(static_cast<Py_ssize_t>(outputs)));
        for (size_t k = 0; k < outputs; ++k)
            PyTuple_SET_ITEM(built.get(), static_cast<Py_ssize_t>(k),
                             Builder(*plan, k, how.structure).build().release());
        return built.release();
    } catch (PythonError &) {
        return nullptr;
    } catch (std::bad_alloc &) {
        return PyErr_NoMemory();
    }
}

}  // namespace cowalk
