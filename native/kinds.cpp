#include "kinds.hpp"

#include <deque>
#include <mutex>
#include <string_view>
#include <unordered_map>

namespace cowalk {
namespace {

struct Known {
    const Kind *kind;
    Ref watch;  // a weak reference whose callback takes the entry away when the type dies
};

// All that is known of types. Never destroyed: at exit there may be no interpreter to give references back to.
struct Registry {
    std::mutex mutex;  // held for table look-ups only, never while Python code runs
    std::unordered_map<PyTypeObject *, Known> types;
    std::unordered_map<PyObject *, const Kind *> kinds_by_object;
    std::deque<Kind> kinds;
    uint64_t changes = 0;  // how often `types` was dropped
};

Registry &registry() {
    static Registry *instance = new Registry;
    return *instance;
}

Ref attribute(PyObject *object, const char *name) { return Ref::checked(PyObject_GetAttrString(object, name)); }

Ref optional(PyObject *object, const char *name) {
    Ref value = attribute(object, name);
    return value.get() == Py_None ? Ref() : value;
}

bool flag(PyObject *object, const char *name) {
    int truth = PyObject_IsTrue(attribute(object, name).get());
    if (truth < 0) throw PythonError{};
    return truth;
}

bool is_a(PyObject *object, const Ref &cls) {
    int truth = PyObject_IsInstance(object, cls.get());
    if (truth < 0) throw PythonError{};
    return truth;
}

Layout read_layout(PyObject *object) {
    Ref value = optional(object, "layout");
    if (!value) return Layout::python;
    const char *text = PyUnicode_AsUTF8(value.get());
    if (!text) throw PythonError{};
    const std::pair<std::string_view, Layout> known[] = {
        {"dict", Layout::dict},   {"list", Layout::list},     {"tuple", Layout::tuple}, {"namedtuple", Layout::namedtuple},
        {"record", Layout::record}, {"groups", Layout::groups},
    };
    for (auto &[name, layout] : known)
        if (name == text) return layout;
    return Layout::python;
}

void read_branch(PyObject *object, Kind &kind) {
    kind.shape = Shape::branch;
    kind.layout = read_layout(object);
    kind.mapping = flag(object, "mapping");
    kind.shared = flag(object, "shared");
    kind.open = attribute(object, "open");
    kind.close = attribute(object, "close");
    kind.finish = optional(object, "finish");
    kind.trainable = optional(object, "trainable");
    Ref plain = attribute(object, "plain");
    kind.plain = plain.get() == reinterpret_cast<PyObject *>(&PyList_Type)    ? Plain::list
                 : plain.get() == reinterpret_cast<PyObject *>(&PyTuple_Type) ? Plain::tuple
                                                                              : Plain::dict;
    Ref names = Ref::checked(PySequence_Tuple(attribute(object, "names").get()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names.get()); ++i) {
        PyObject *name = PyTuple_GET_ITEM(names.get(), i);
        Py_INCREF(name);
        if (PyUnicode_CheckExact(name)) PyUnicode_InternInPlace(&name);
        kind.names.push_back(Ref::steal(name));
    }
}

Kind read_kind(PyObject *object) {
    Runtime &rt = runtime();
    Kind kind;
    kind.python = Ref::borrow(object);
    if (is_a(object, rt.branch)) {
        read_branch(object, kind);
    } else if (is_a(object, rt.box)) {
        kind.shape = Shape::box;
        kind.ties = flag(object, "ties");
        kind.open = attribute(object, "open");
        kind.close = attribute(object, "close");
        kind.trainable = optional(object, "trainable");
    } else if (is_a(object, rt.leaf)) {
        kind.ties = flag(object, "ties");
        kind.numeric = optional(object, "numeric");
        kind.missing = optional(object, "missing");
    } else if (is_a(object, rt.nothing)) {
        kind.shape = Shape::nothing;
    } else {
        PyErr_Format(PyExc_TypeError, "a kind is a Leaf, Branch, Box or Nothing, not %R", object);
        throw PythonError{};
    }
    return kind;
}

const Kind *kind_of_object(PyObject *object) {
    {
        std::lock_guard lock(registry().mutex);
        auto found = registry().kinds_by_object.find(object);
        if (found != registry().kinds_by_object.end()) return found->second;
    }
    Kind kind = read_kind(object);
    std::lock_guard lock(registry().mutex);
    auto [place, added] = registry().kinds_by_object.try_emplace(object, nullptr);
    if (added) {
        registry().kinds.push_back(std::move(kind));
        place->second = &registry().kinds.back();
    }
    return place->second;
}

PyObject *type_died(PyObject *address, PyObject *) {
    auto *type = static_cast<PyTypeObject *>(PyLong_AsVoidPtr(address));
    Known gone{nullptr, Ref()};
    {
        std::lock_guard lock(registry().mutex);
        auto found = registry().types.find(type);
        if (found != registry().types.end()) {
            gone = std::move(found->second);
            registry().types.erase(found);
        }
    }
    Py_RETURN_NONE;
}

PyMethodDef type_died_def = {"type_died", type_died, METH_O, nullptr};

Ref watch(PyTypeObject *type) {
    Ref address = Ref::checked(PyLong_FromVoidPtr(type));
    Ref callback = Ref::checked(PyCFunction_New(&type_died_def, address.get()));
    return Ref::checked(PyWeakref_NewRef(reinterpret_cast<PyObject *>(type), callback.get()));
}

}  // namespace

Runtime &runtime() {
    static Runtime *instance = new Runtime;  // never destroyed, as Registry
    return *instance;
}

const Kind *find_kind(PyTypeObject *type, bool &lasting) {
    lasting = true;
    uint64_t changes;
    {
        std::lock_guard lock(registry().mutex);
        changes = registry().changes;
        auto found = registry().types.find(type);
        if (found != registry().types.end()) return found->second.kind;
    }
    PyObject *as_object = reinterpret_cast<PyObject *>(type);
    Ref answer = Ref::checked(PyObject_CallOneArg(runtime().find_kind.get(), as_object));
    if (!PyTuple_Check(answer.get()) || PyTuple_GET_SIZE(answer.get()) != 2) {
        PyErr_SetString(PyExc_TypeError, "find_kind returns a pair");
        throw PythonError{};
    }
    const Kind *kind = kind_of_object(PyTuple_GET_ITEM(answer.get(), 0));
    lasting = PyTuple_GET_ITEM(answer.get(), 1) == Py_True;
    if (lasting) {
        Known known{kind, watch(type)};
        std::lock_guard lock(registry().mutex);
        // Not if somebody registered something while Python looked: the answer may be out of date.
        if (changes == registry().changes) registry().types.try_emplace(type, std::move(known));
    }
    return kind;
}

void forget_kinds() {
    std::unordered_map<PyTypeObject *, Known> old;
    std::lock_guard lock(registry().mutex);
    std::swap(old, registry().types);
    ++registry().changes;
}

const Kind *KindCache::look_up(PyTypeObject *type, Entry &entry) {
    for (auto &[held, kind] : passing_)
        if (held.get() == reinterpret_cast<PyObject *>(type)) return kind;
    bool lasting = true;
    const Kind *kind = find_kind(type, lasting);
    if (lasting)
        entry = {type, kind};
    else
        passing_.emplace_back(Ref::borrow(reinterpret_cast<PyObject *>(type)), kind);
    return kind;
}

PyObject *setup(PyObject *, PyObject *objects) {
    Runtime &rt = runtime();
    const std::pair<const char *, Ref *> wanted[] = {
        {"Leaf", &rt.leaf},
        {"Branch", &rt.branch},
        {"Box", &rt.box},
        {"Nothing", &rt.nothing},
        {"MISSING", &rt.missing},
        {"Index", &rt.index},
        {"Path", &rt.path},
        {"PathWhere", &rt.path_where},
        {"find_kind", &rt.find_kind},
        {"isleaf", &rt.isleaf},
        {"isnumeric", &rt.isnumeric},
        {"istrainable", &rt.istrainable},
        {"holds_value", &rt.holds_value},
        {"same", &rt.same},
        {"note", &rt.note},
        {"wrong_outputs", &rt.wrong_outputs},
        {"CycleError", &rt.cycle_error},
        {"structure_error", &rt.structure_error},
        {"TieError", &rt.tie_error},
    };
    for (auto &[name, slot] : wanted) {
        PyObject *object = PyMapping_GetItemString(objects, name);
        if (!object) return nullptr;
        *slot = Ref::steal(object);
    }
    rt.dunder_dict = Ref::steal(PyUnicode_InternFromString("__dict__"));
    try {
        prepare_paths();
    } catch (PythonError &) {
        return nullptr;
    }
    forget_kinds();
    Py_RETURN_NONE;
}

}  // namespace cowalk
