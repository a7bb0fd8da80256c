// What a plan can tell of itself: paths, differences, the values of a visit; and the options of a walk.
#include "plan.hpp"

#include <string_view>

namespace cowalk {

namespace {

// One plan that this thread has used before, empty but for its memory.
std::unique_ptr<Plan> &spare_plan() {
    thread_local std::unique_ptr<Plan> spare;
    return spare;
}

// The first positions' keys, made by setup() and never changed after: reading them needs no lock.
std::vector<Ref> &positions() {
    static auto *known = new std::vector<Ref>;  // never destroyed, as Registry
    return *known;
}

Ref new_position(Py_ssize_t i) {
    Ref number = Ref::checked(PyLong_FromSsize_t(i));
    return Ref::checked(PyObject_CallOneArg(runtime().index.get(), number.get()));
}

#ifndef Py_GIL_DISABLED
// A walk makes and drops a Path a leaf. It has no attributes, so all there is to free is a tuple's items; what Python does
// for any class with a base (subtype_dealloc) took a fifth of the walk's time.
void path_dealloc(PyObject *path) {
    PyTypeObject *type = Py_TYPE(path);
    PyObject_GC_UnTrack(path);
    Py_TRASHCAN_BEGIN(path, path_dealloc)
    for (Py_ssize_t i = Py_SIZE(path); i-- > 0;) Py_XDECREF(PyTuple_GET_ITEM(path, i));
    type->tp_free(path);
    Py_DECREF(type);
    Py_TRASHCAN_END
}
#endif

}  // namespace

void prepare_paths() {
#ifndef Py_GIL_DISABLED
    auto *type = reinterpret_cast<PyTypeObject *>(runtime().path.get());
    if (type->tp_dictoffset == 0 && type->tp_weaklistoffset == 0) type->tp_dealloc = path_dealloc;
#endif

    std::vector<Ref> made;
    for (Py_ssize_t i = 0; i < 1024; ++i) made.push_back(new_position(i));
    positions() = std::move(made);
}

Ref position_key(Py_ssize_t i) {
    const std::vector<Ref> &known = positions();
    return static_cast<size_t>(i) < known.size() ? known[static_cast<size_t>(i)] : new_position(i);
}

PlanPtr new_plan() {
    std::unique_ptr<Plan> &spare = spare_plan();
    return PlanPtr(spare ? spare.release() : new Plan);
}

void PlanReturner::operator()(Plan *plan) const {
    plan->clear();  // may run user code, which may walk
    std::unique_ptr<Plan> &spare = spare_plan();
    constexpr size_t kept = 1 << 18;  // some 20 MB: a larger plan is given back
    if (!spare && plan->values.capacity() <= kept && plan->keys.capacity() <= kept)
        spare.reset(plan);
    else
        delete plan;
}

void Plan::clear() {
    steps.clear();
    visits.clear();
    values.clear();
    boxes.clear();
    keys.clear();
    contents.clear();
    places.clear();
    other_spots.clear();
    differences.clear();
    tie_errors.clear();
    some_missing = false;
    frames.clear();
    pending.clear();
    row.clear();
    results.clear();
    stack.clear();
}

Ref Plan::key(Spot spot) const {
    if (spot.parent == none) return Ref();
    const Place &parent = places[spot.parent];
    return child_key(parent.kind, keys, parent.keys, spot.number);
}

Ref Plan::path(Spot spot) const {
    Py_ssize_t length = 0;
    for (Spot at = spot; at.parent != none; at = places[at.parent].spot) ++length;
    auto *type = reinterpret_cast<PyTypeObject *>(runtime().path.get());
    Ref path = Ref::checked(type->tp_alloc(type, length));
    for (Spot at = spot; at.parent != none; at = places[at.parent].spot)
        PyTuple_SET_ITEM(path.get(), --length, key(at).release());
    return path;
}

Ref Plan::raw_differences(bool all) const {
    static const char *names[] = {"absent", "extra", "length", "leaf", "branch", "missing"};
    Ref list = Ref::checked(PyList_New(0));
    for (const Difference &difference : differences) {
        bool clash = difference.kind == Misfit::leaf || difference.kind == Misfit::branch;
        if (!difference.confirmed || !(all || clash)) continue;
        Ref where = path(difference.spot);
        PyObject *key = difference.key ? difference.key.get() : Py_None;
        Ref raw = Ref::checked(
            Py_BuildValue("(sIOO)", names[static_cast<int>(difference.kind)], difference.tree, where.get(), key));
        if (PyList_Append(list.get(), raw.get()) < 0) throw PythonError{};
    }
    return list;
}

int Plan::traverse(visitproc visit, void *arg) const {
    for (const Step &step : steps) Py_VISIT(step.node.get());
    for (const Value &value : values)
        if (!value.is_absent()) Py_VISIT(value.get());
    for (const Wrapped &wrapped : boxes) Py_VISIT(wrapped.box.get());
    for (const Ref &key : keys) Py_VISIT(key.get());
    for (const Ref &content : contents) Py_VISIT(content.get());
    for (const Place &place : places) {
        Py_VISIT(place.node.get());
    }
    for (const Difference &difference : differences) Py_VISIT(difference.key.get());
    for (const Ref &error : tie_errors) Py_VISIT(error.get());
    return 0;
}

namespace {

[[noreturn]] void raise_structure_error(const Ref &raw, PyObject *trees) {
    Ref error = Ref::checked(PyObject_CallFunctionObjArgs(runtime().structure_error.get(), raw.get(), trees, nullptr));
    PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error.get())), error.get());
    throw PythonError{};
}

}  // namespace

void settle(Plan &plan, const Options &options, PyObject *trees) {
    if (!plan.differences.empty()) {
        Ref raw = plan.raw_differences(options.strict);
        if (PyList_GET_SIZE(raw.get())) raise_structure_error(raw, trees);
    }
    if (!plan.tie_errors.empty()) {
        PyErr_SetObject(runtime().tie_error.get(), plan.tie_errors.front().get());
        throw PythonError{};
    }
    if (!plan.some_missing || options.missing == Missing::pass || options.missing == Missing::make) return;
    plan.differences.clear();
    PyObject *missing = runtime().missing.get();
    for (uint32_t i = 0; i < plan.visits.size(); ++i)
        for (uint32_t j = 1; j < plan.trees; ++j) {
            if (plan.value(i, j) != missing) continue;
            plan.visits[i].skipped = true;
            if (options.missing == Missing::error)
                plan.differences.push_back({Misfit::missing, j, plan.visits[i].spot, Ref(), true});
        }
    if (!plan.differences.empty())
        raise_structure_error(plan.raw_differences(true), trees);
}

std::vector<Value> filled(const Plan &plan, uint32_t visit, const Options &options) {
    std::vector<Value> values(plan.values.begin() + static_cast<ptrdiff_t>(visit * plan.trees),
                              plan.values.begin() + static_cast<ptrdiff_t>((visit + 1) * plan.trees));
    if (options.missing == Missing::make)
        for (size_t j = 1; j < values.size(); ++j)
            if (values[j].get() == runtime().missing.get())
                values[j] = Value(Ref::checked(PyObject_CallOneArg(options.missing_object, values[0].get())));
    return values;
}

namespace {

int text_number(PyObject *object, const std::string_view *names, int count) {
    if (!PyUnicode_Check(object)) return -1;
    const char *text = PyUnicode_AsUTF8(object);
    if (!text) throw PythonError{};
    for (int i = 0; i < count; ++i)
        if (names[i] == text) return i;
    return -1;
}

}  // namespace

Options read_options(PyObject *where, PyObject *missing, PyObject *strict, PyObject *ties) {
    static constexpr std::string_view policies[] = {"skip", "pass", "error"};
    static constexpr std::string_view ways[] = {"share", "sum", "first", "each"};
    Runtime &rt = runtime();
    Options options;
    options.where_object = where;
    options.where = where == rt.isleaf.get()        ? Where::isleaf
                    : where == rt.isnumeric.get()   ? Where::isnumeric
                    : where == rt.istrainable.get() ? Where::istrainable
                    : Py_TYPE(where) == reinterpret_cast<PyTypeObject *>(rt.path_where.get()) ? Where::path_predicate
                                                                                               : Where::predicate;
    int policy = text_number(missing, policies, 3);
    options.missing = policy < 0 ? Missing::make : static_cast<Missing>(policy);
    options.missing_object = missing;
    int truth = PyObject_IsTrue(strict);
    if (truth < 0) throw PythonError{};
    options.strict = truth;
    int way = text_number(ties, ways, 4);
    options.ties = way < 0 ? Ties::share : static_cast<Ties>(way);
    return options;
}

}  // namespace cowalk
