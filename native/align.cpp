// Going down the lead beside its followers: class Alignment of src/cowalk/tree/reference.py, with an explicit stack.
#include <cstring>

#include "plan.hpp"

namespace cowalk {
namespace {

// The opened children of a follower: a dict, borrowed or made for the purpose.
struct Opened {
    Ref dict;
    const Kind *kind;
};

// Whether two keys are the same text, at the price of a look at their characters; false for all other keys.
bool same_text(PyObject *a, PyObject *b) {
    if (a == b) return true;
    if (!PyUnicode_CheckExact(a) || !PyUnicode_CheckExact(b)) return false;
    Py_ssize_t length = PyUnicode_GET_LENGTH(a);
    if (length != PyUnicode_GET_LENGTH(b) || PyUnicode_KIND(a) != PyUnicode_KIND(b)) return false;
    return std::memcmp(PyUnicode_DATA(a), PyUnicode_DATA(b), static_cast<size_t>(length * PyUnicode_KIND(a))) == 0;
}

Ref dict_item(PyObject *dict, PyObject *key) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *found = nullptr;
    if (PyDict_GetItemRef(dict, key, &found) < 0) throw PythonError{};
    return Ref::steal(found);
#else
    PyObject *found = PyDict_GetItemWithError(dict, key);
    if (!found && PyErr_Occurred()) throw PythonError{};
    return Ref::borrow(found);
#endif
}

// The other spelling of a numeric key (paths.py, twin), or nothing.
Ref twin(PyObject *key) {
    if (PyUnicode_Check(key)) {
        Py_ssize_t length = PyUnicode_GET_LENGTH(key);
        if (length == 0 || length >= 18 || !PyUnicode_IS_ASCII(key)) return Ref();
        const char *text = reinterpret_cast<const char *>(PyUnicode_1BYTE_DATA(key));
        long long number = 0;
        for (Py_ssize_t i = 0; i < length; ++i) {
            if (text[i] < '0' || text[i] > '9') return Ref();
            number = 10 * number + (text[i] - '0');
        }
        if (text[0] == '0' && length > 1) return Ref();
        return Ref::checked(PyLong_FromLongLong(number));
    }
    if (PyLong_Check(key) && !PyBool_Check(key)) {
        int overflow = 0;
        long long number = PyLong_AsLongLongAndOverflow(key, &overflow);
        if (number == -1 && PyErr_Occurred()) throw PythonError{};
        if (overflow < 0 || (!overflow && number < 0)) return Ref();
        return Ref::checked(PyLong_Type.tp_repr(key));
    }
    return Ref();
}

Ref as_dict(Ref mapping) {
    if (PyDict_CheckExact(mapping.get())) return mapping;
    Ref dict = Ref::checked(PyDict_New());
    if (PyDict_Update(dict.get(), mapping.get()) < 0) throw PythonError{};
    return dict;
}

Ref instance_dict(PyObject *object) { return Ref::checked(PyObject_GenericGetDict(object, nullptr)); }

class Alignment {
public:
    Alignment(PyObject *const *trees, size_t count, const Options &options) : options_(options), plan_(new_plan()) {
        plan_->trees = width_ = count;
        for (size_t j = 0; j < count; ++j) plan_->row.push_back(Value::borrow(trees[j]));
        visit(Spot{}, plan_->row.data());
        while (!plan_->frames.empty()) step();
        finish();
    }
    PlanPtr take() { return std::move(plan_); }

private:
    const Options &options_;
    PlanPtr plan_;
    size_t width_;
    KindCache kinds_;
    AddressMap tied_;
    AddressMap open_;  // open nodes, from address to place; kept only when they are many
    bool open_kept_ = false;

    PyObject *missing() { return runtime().missing.get(); }
    Value missing_value() {
        plan_->some_missing = true;
        return Value::borrow(missing());
    }

    // --- one node ---

    void step() {
        Frame &frame = plan_->frames.back();
        if (options_.where == Where::isleaf) add_plain_leaves(frame);
        if (frame.next == frame.children) return close();
        uint32_t number = frame.next++;
        Spot spot{frame.place, number};
        Value *row = &plan_->pending[frame.rows + number * width_];
        if (frame.allowed) {
            int allowed = PySequence_Contains(frame.allowed.get(), plan_->key(spot).get());
            if (allowed < 0) throw PythonError{};
            if (!allowed) return keep(row[0].get(), nullptr);
        }
        // The row moves out of `pending`, which may grow below.
        plan_->row.assign(std::make_move_iterator(row), std::make_move_iterator(row + width_));
        visit(spot, plan_->row.data());
    }

    // The quick way through leaves that need no question asked: no ties, no test for missing, no call into Python. Their
    // rows lie in `pending` as they are to lie in `plan.values`.
    void add_plain_leaves(Frame &frame) {
        uint32_t end = frame.next;
        while (end < frame.children && is_plain_row(&plan_->pending[frame.rows + end * width_])) ++end;
        if (end == frame.next) return;
        Plan &plan = *plan_;
        auto first = plan_->pending.begin() + static_cast<ptrdiff_t>(frame.rows + frame.next * width_);
        plan.values.insert(plan.values.end(), std::make_move_iterator(first),
                           std::make_move_iterator(first + static_cast<ptrdiff_t>((end - frame.next) * width_)));
        push_visit_step(end - frame.next);
        for (; frame.next < end; ++frame.next) plan.visits.push_back({Spot{frame.place, frame.next}, 0, 0, false, false});
    }

    bool is_plain_row(const Value *row) {
        PyTypeObject *type = Py_TYPE(row[0].get());
        const Kind *kind = kinds_.of(row[0].get());
        if (kind->shape != Shape::leaf || kind->missing || (kind->ties && options_.ties != Ties::each)) return false;
        for (size_t j = 1; j < width_; ++j)
            if (row[j].is_absent() || (Py_TYPE(row[j].get()) != type && !is_plain_leaf(row[j].get()))) return false;
        return true;
    }

    bool is_plain_leaf(PyObject *value) {
        const Kind *kind = kinds_.of(value);
        return kind->shape == Shape::leaf && !kind->missing;
    }

    void push_visit(const Visit &visit) {
        push_visit_step(1);
        plan_->visits.push_back(visit);
    }

    void push_visit_step(uint32_t count) {
        Plan &plan = *plan_;
        uint32_t number = static_cast<uint32_t>(plan.visits.size());
        if (!plan.steps.empty() && plan.steps.back().op == Op::visit && plan.steps.back().number + plan.steps.back().count == number)
            plan.steps.back().count += count;
        else
            plan.steps.push_back({Op::visit, number, count, Ref(), nullptr});
    }

    void visit(Spot spot, Value *row) {
        Ref node = Ref::borrow(row[0].get());
        const Kind *kind = kinds_.of(node.get());
        uint32_t boxes_begin = static_cast<uint32_t>(plan_->boxes.size());
        while (true) {
            if (!options_.only_leaves() && asked(spot, node.get())) return add_visit(spot, row, node, kind, boxes_begin);
            if (kind->shape != Shape::box) break;
            if (options_.where == Where::istrainable && kind->trainable && !ask(kind->trainable, node.get())) {
                plan_->boxes.resize(boxes_begin);
                return keep(row[0].get(), nullptr);
            }
            plan_->boxes.push_back({node, kind});
            node = Ref::checked(PyObject_CallOneArg(kind->open.get(), node.get()));
            kind = kinds_.of(node.get());
        }
        if (kind->shape == Shape::branch) return open(spot, row, std::move(node), kind, boxes_begin);
        if (options_.only_leaves() && kind->shape == Shape::leaf && wanted(node.get(), kind))
            return add_visit(spot, row, node, kind, boxes_begin);
        plan_->boxes.resize(boxes_begin);
        keep(row[0].get(), node.get());
    }

    bool ask(const Ref &predicate, PyObject *node) {
        Ref answer = Ref::checked(PyObject_CallOneArg(predicate.get(), node));
        int truth = PyObject_IsTrue(answer.get());
        if (truth < 0) throw PythonError{};
        return truth;
    }

    bool asked(Spot spot, PyObject *node) {
        Ref answer;
        if (options_.where == Where::path_predicate) {
            Ref path = plan_->path(spot);
            PyObject *args[] = {path.get(), node};
            answer = Ref::checked(PyObject_Vectorcall(options_.where_object, args, 2, nullptr));
        } else {
            answer = Ref::checked(PyObject_CallOneArg(options_.where_object, node));
        }
        int truth = PyObject_IsTrue(answer.get());
        if (truth < 0) throw PythonError{};
        return truth;
    }

    bool wanted(PyObject *node, const Kind *kind) {
        if (kind->missing && ask(kind->missing, node)) return false;
        return options_.where == Where::isleaf || (kind->numeric && ask(kind->numeric, node));
    }

    bool is_missing(PyObject *value, const Kind *kind) {
        return kind->shape == Shape::nothing || (kind->shape == Shape::leaf && kind->missing && ask(kind->missing, value));
    }

    // `content` is what the boxes around the node hold; null means: find out.
    void keep(PyObject *node, PyObject *content) {
        Step step{Op::keep, none, 0, Ref::borrow(node), nullptr};
        Ref inner = Ref::borrow(content ? content : node);
        if (!content) unbox(inner);
        if (inner.get() != node) {
            step.number = static_cast<uint32_t>(plan_->contents.size());
            plan_->contents.push_back(std::move(inner));
        }
        plan_->steps.push_back(std::move(step));
    }

    const Kind *unbox(Ref &node) {
        const Kind *kind = kinds_.of(node.get());
        while (kind->shape == Shape::box) {
            node = Ref::checked(PyObject_CallOneArg(kind->open.get(), node.get()));
            kind = kinds_.of(node.get());
        }
        return kind;
    }

    // --- leaves ---

    void add_visit(Spot spot, Value *row, const Ref &node, const Kind *kind, uint32_t boxes_begin) {
        Plan &plan = *plan_;
        for (size_t j = 1; j < width_; ++j) settle_follower(j, spot, row[j], node.get(), kind);
        PyObject *tie = tie_of(node.get(), kind, boxes_begin);
        uint32_t number = static_cast<uint32_t>(plan.visits.size());
        if (tie) {
            uint32_t first = static_cast<uint32_t>(tied_.find_or_add(tie, number));
            if (first < number) {
                plan.boxes.resize(boxes_begin);
                join(first, spot, row);
                plan.steps.push_back({Op::visit, first, 1, Ref(), nullptr});
                return;
            }
        }
        plan.values.push_back(node.get() == row[0].get() ? std::move(row[0]) : Value(Ref(node)));
        for (size_t j = 1; j < width_; ++j) plan.values.push_back(std::move(row[j]));
        uint32_t boxes = static_cast<uint32_t>(plan.boxes.size()) - boxes_begin;
        push_visit({spot, boxes_begin, boxes, tie != nullptr, false});
    }

    PyObject *tie_of(PyObject *node, const Kind *kind, uint32_t boxes_begin) {
        if (options_.ties == Ties::each) return nullptr;
        for (size_t i = boxes_begin; i < plan_->boxes.size(); ++i)
            if (plan_->boxes[i].kind->ties) return plan_->boxes[i].box.get();
        return kind->ties ? node : nullptr;
    }

    // What a follower has to say at a leaf of the lead (reference.py, follower_value).
    void settle_follower(size_t tree, Spot spot, Value &value, PyObject *lead, const Kind *lead_kind) {
        if (value.is_absent()) return;
        if (value.get() == missing()) {
            value = missing_value();
            return;
        }
        if (lead_kind->shape != Shape::leaf) {
            if (is_missing(value.get(), kinds_.of(value.get()))) value = missing_value();
            return;
        }
        if (Py_TYPE(value.get()) == Py_TYPE(lead) && !lead_kind->missing) return;
        Ref inner = Ref::borrow(value.get());
        const Kind *kind = unbox(inner);
        if (kind->shape == Shape::branch)
            value = misfit(Misfit::branch, tree, spot, Ref(), true);
        else if (is_missing(inner.get(), kind))
            value = missing_value();
        else if (inner.get() != value.get())
            value = Value(std::move(inner));
    }

    void join(uint32_t first, Spot spot, Value *row) {
        Plan &plan = *plan_;
        plan.other_spots.emplace_back(first, spot);
        for (size_t j = 1; j < width_; ++j) {
            Value &old = plan.values[first * width_ + j];
            Value &now = row[j];
            bool old_missing = !old.is_absent() && old.get() == missing();
            bool now_missing = !now.is_absent() && now.get() == missing();
            if (now.is_absent() || (now_missing && !old.is_absent())) continue;
            if (old.is_absent() || old_missing) {
                old = std::move(now);
            } else if (options_.ties == Ties::sum) {
                Ref sum = Ref::checked(PyNumber_Add(old.get(), now.get()));
                plan.values[first * width_ + j] = Value(std::move(sum));
            } else if (options_.ties == Ties::share && old.get() != now.get()) {
                Ref answer = Ref::checked(PyObject_CallFunctionObjArgs(runtime().same.get(), old.get(), now.get(), nullptr));
                if (answer.get() == Py_False) add_tie_error(first, j);
            }
        }
    }

    void add_tie_error(uint32_t first, size_t tree) {
        Ref paths = Ref::checked(PyList_New(0));
        auto append = [&](Spot spot) {
            if (PyList_Append(paths.get(), plan_->path(spot).get()) < 0) throw PythonError{};
        };
        append(plan_->visits[first].spot);
        for (auto &[visit, spot] : plan_->other_spots)
            if (visit == first) append(spot);
        plan_->tie_errors.push_back(
            Ref::checked(PyObject_CallFunction(runtime().tie_error.get(), "On", paths.get(), static_cast<Py_ssize_t>(tree))));
    }

    // --- branches ---

    void open(Spot spot, Value *row, Ref node, const Kind *kind, uint32_t boxes_begin) {
        Plan &plan = *plan_;
        check_cycle(spot, node.get());
        Frame frame{};
        frame.place = static_cast<uint32_t>(plan.places.size());
        frame.keys = none;
        frame.rows = plan_->pending.size();
        frame.boxes_begin = boxes_begin;
        frame.boxes_count = static_cast<uint32_t>(plan.boxes.size()) - boxes_begin;
        plan.places.push_back({spot, none, node, kind});
        open_lead(frame, node.get(), kind);
        plan.places.back().keys = frame.keys;
        if (options_.where == Where::istrainable && kind->trainable)
            frame.allowed = Ref::checked(PyObject_CallOneArg(kind->trainable.get(), node.get()));
        for (size_t j = 1; j < width_; ++j) match(j, frame, spot, kind, row[j]);
        remember_open(node.get(), frame.place);
        plan_->frames.push_back(std::move(frame));
    }

    void close() {
        Frame &frame = plan_->frames.back();
        Place &place = plan_->places[frame.place];
        if (open_kept_) open_.erase(place.node.get());
        plan_->pending.resize(frame.rows);
        plan_->steps.push_back({Op::close, frame.place, frame.children, Ref(), place.kind});
        for (uint32_t i = frame.boxes_count; i-- > 0;) {
            Wrapped &wrapped = plan_->boxes[frame.boxes_begin + i];
            plan_->steps.push_back({Op::close_box, 0, 0, wrapped.box, wrapped.kind});
        }
        plan_->frames.pop_back();
    }

    // Few open nodes are searched one by one; when they are many, a table of them is kept.
    static constexpr size_t few = 24;

    void check_cycle(Spot spot, PyObject *node) {
        int64_t found = -1;
        if (open_kept_) {
            found = open_.find(node);
        } else {
            for (const Frame &frame : plan_->frames)
                if (plan_->places[frame.place].node.get() == node) found = frame.place;
        }
        if (found < 0) return;
        const Place &first = plan_->places[static_cast<size_t>(found)];
        Ref first_path = plan_->path(first.spot);
        Ref path = plan_->path(spot);
        Ref error = Ref::checked(
            PyObject_CallFunctionObjArgs(runtime().cycle_error.get(), first_path.get(), path.get(), nullptr));
        PyErr_SetObject(runtime().cycle_error.get(), error.get());
        throw PythonError{};
    }

    void remember_open(PyObject *node, uint32_t place) {
        if (!open_kept_ && plan_->frames.size() >= few) {
            for (const Frame &frame : plan_->frames) open_.add(plan_->places[frame.place].node.get(), frame.place);
            open_kept_ = true;
        }
        if (open_kept_) open_.add(node, place);
    }

    void push_child(PyObject *child) {
        plan_->pending.push_back(Value::borrow(child));
        for (size_t j = 1; j < width_; ++j) plan_->pending.emplace_back();
    }

    // Take a node's children as they are now, with references of our own: user code runs between them later.
    void open_lead(Frame &frame, PyObject *node, const Kind *kind) {
        switch (kind->layout) {
        case Layout::list: {
            COWALK_LOCK(node);
            frame.children = static_cast<uint32_t>(PyList_GET_SIZE(node));
            for (uint32_t i = 0; i < frame.children; ++i) push_child(PyList_GET_ITEM(node, i));
            COWALK_UNLOCK();
            return;
        }
        case Layout::namedtuple:
            if (static_cast<size_t>(PyTuple_GET_SIZE(node)) != kind->names.size())
                Ref::checked(PyObject_CallOneArg(kind->open.get(), node));  // says what is wrong
            [[fallthrough]];
        case Layout::tuple:
            frame.children = static_cast<uint32_t>(PyTuple_GET_SIZE(node));
            for (uint32_t i = 0; i < frame.children; ++i) push_child(PyTuple_GET_ITEM(node, i));
            return;
        case Layout::dict: return open_dict(frame, node, false);
        case Layout::record: {
            Ref attributes = instance_dict(node);
            begin_keys(frame);
            for (const Ref &name : kind->names) {
                Ref child = dict_item(attributes.get(), name.get());
                if (child) add_child(frame, name.get(), child.get());
            }
            return;
        }
        case Layout::groups: {
            Ref attributes = instance_dict(node);
            begin_keys(frame);
            for (const Ref &name : kind->names) {
                Ref group = dict_item(attributes.get(), name.get());
                if (group && PyDict_Check(group.get())) open_dict(frame, group.get(), true);
            }
            return;
        }
        case Layout::python: {
            Ref opened = as_dict(Ref::checked(PyObject_CallOneArg(kind->open.get(), node)));
            return open_dict(frame, opened.get(), false);
        }
        }
    }

    void begin_keys(Frame &frame) {
        if (frame.keys == none) frame.keys = static_cast<uint32_t>(plan_->keys.size());
    }

    void add_child(Frame &frame, PyObject *key, PyObject *child) {
        plan_->keys.push_back(Ref::borrow(key));
        push_child(child);
        ++frame.children;
    }

    void open_dict(Frame &frame, PyObject *dict, bool skip_none) {
        begin_keys(frame);
        PyObject *key, *child;
        Py_ssize_t at = 0;
        COWALK_LOCK(dict);
        size_t size = static_cast<size_t>(PyDict_GET_SIZE(dict));
        size_t keys = plan_->keys.size(), rows = plan_->pending.size();
        plan_->keys.resize(keys + size);
        plan_->pending.resize(rows + size * width_);
        size_t found = 0;
        while (found < size && PyDict_Next(dict, &at, &key, &child)) {
            if (skip_none && child == Py_None) continue;
            plan_->keys[keys + found] = Ref::borrow(key);
            plan_->pending[rows + found * width_] = Value::borrow(child);
            ++found;
        }
        plan_->keys.resize(keys + found);
        plan_->pending.resize(rows + found * width_);
        frame.children += static_cast<uint32_t>(found);
        COWALK_UNLOCK();
    }

    // --- matching ---

    Value &beside(const Frame &frame, uint32_t child, size_t tree) { return plan_->pending[frame.rows + child * width_ + tree]; }

    void fill(const Frame &frame, size_t tree, const Value &value) {
        for (uint32_t i = 0; i < frame.children; ++i) beside(frame, i, tree) = value;
    }

    // What one follower has beside each child of a node of the lead.
    void match(size_t tree, const Frame &frame, Spot spot, const Kind *kind, const Value &value) {
        if (value.is_absent() || value.get() == missing()) return fill(frame, tree, value);
        Ref follower = Ref::borrow(value.get());
        const Kind *follower_kind = unbox(follower);
        if (is_missing(follower.get(), follower_kind)) return fill(frame, tree, missing_value());
        if (follower_kind->shape != Shape::branch) {
            if (frame.children) fill(frame, tree, misfit(Misfit::leaf, tree, spot, Ref(), false));
            return;
        }
        if (by_position(kind, follower_kind)) return match_positions(tree, frame, spot, follower.get());
        Opened opened{open_follower(follower.get(), follower_kind), follower_kind};
        match_keys(tree, frame, spot, kind, opened);
    }

    // Two lists or tuples, or two named tuples of one class: the children belong together by position.
    static bool by_position(const Kind *kind, const Kind *follower) {
        auto positional = [](const Kind *k) { return k->layout == Layout::list || k->layout == Layout::tuple; };
        return (positional(kind) && positional(follower)) || (kind == follower && kind->layout == Layout::namedtuple);
    }

    void match_positions(size_t tree, const Frame &frame, Spot spot, PyObject *follower) {
        std::vector<Ref> extras;
        Py_ssize_t length = 0;
        if (PyTuple_Check(follower)) {
            length = PyTuple_GET_SIZE(follower);
            for (Py_ssize_t i = 0; i < length; ++i) take_position(tree, frame, i, PyTuple_GET_ITEM(follower, i), extras);
        } else {
            COWALK_LOCK(follower);
            length = PyList_GET_SIZE(follower);
            for (Py_ssize_t i = 0; i < length; ++i) take_position(tree, frame, i, PyList_GET_ITEM(follower, i), extras);
            COWALK_UNLOCK();
        }
        if (static_cast<uint32_t>(length) == frame.children) return;
        Value absent = misfit(Misfit::length, tree, spot, Ref(), false);
        for (uint32_t i = static_cast<uint32_t>(length); i < frame.children; ++i) beside(frame, i, tree) = absent;
        for (const Ref &extra : extras)
            if (holds_value(extra.get())) plan_->differences[absent.difference()].confirmed = true;
    }

    void take_position(size_t tree, const Frame &frame, Py_ssize_t i, PyObject *child, std::vector<Ref> &extras) {
        if (static_cast<uint32_t>(i) < frame.children)
            beside(frame, static_cast<uint32_t>(i), tree) = Value::borrow(child);
        else
            extras.push_back(Ref::borrow(child));
    }

    Ref open_follower(PyObject *follower, const Kind *kind) {
        if (kind->layout == Layout::dict) return Ref::borrow(follower);
        if (kind->layout != Layout::record && kind->layout != Layout::groups)
            return as_dict(Ref::checked(PyObject_CallOneArg(kind->open.get(), follower)));
        Ref attributes = instance_dict(follower);
        Ref opened = Ref::checked(PyDict_New());
        for (const Ref &name : kind->names) {
            Ref child = dict_item(attributes.get(), name.get());
            if (!child) continue;
            if (kind->layout == Layout::record) {
                if (PyDict_SetItem(opened.get(), name.get(), child.get()) < 0) throw PythonError{};
            } else if (PyDict_Check(child.get())) {
                PyObject *key, *value;
                Py_ssize_t at = 0;
                std::vector<std::pair<Ref, Ref>> items;
                COWALK_LOCK(child.get());
                while (PyDict_Next(child.get(), &at, &key, &value))
                    if (value != Py_None) items.emplace_back(Ref::borrow(key), Ref::borrow(value));
                COWALK_UNLOCK();
                for (auto &[k, v] : items)
                    if (PyDict_SetItem(opened.get(), k.get(), v.get()) < 0) throw PythonError{};
            }
        }
        return opened;
    }

    void match_keys(size_t tree, const Frame &frame, Spot spot, const Kind *kind, const Opened &opened) {
        PyObject *theirs = opened.dict.get();
        bool mappings = kind->mapping && opened.kind->mapping;
        bool sequences = kind->sequence() && opened.kind->sequence();
        Value length;
        bool is_length = sequences && PyDict_Size(theirs) != static_cast<Py_ssize_t>(frame.children);
        if (is_length) length = misfit(Misfit::length, tree, spot, Ref(), false);
        Py_ssize_t matched = 0;
        Ref lead_keys;           // as a set, made when first needed
        std::vector<Ref> twins;  // keys of the follower found under another spelling
        Py_ssize_t at = 0;
        bool in_step = true;  // the follower's next key is the lead's next key: no look-up needed
        for (uint32_t i = 0; i < frame.children; ++i) {
            Ref child;
#ifndef Py_GIL_DISABLED
            PyObject *their_key, *their_child;
            if (in_step && frame.keys != none && PyDict_Next(theirs, &at, &their_key, &their_child) &&
                same_text(their_key, plan_->keys[frame.keys + i].get())) {
                beside(frame, i, tree) = Value::borrow(their_child);
                ++matched;
                continue;
            }
            in_step = false;
#endif
            Ref key = child_key(kind, plan_->keys, frame.keys, i);
            if (!child) child = dict_item(theirs, key.get());
            if (!child && !mappings) child = find_twin(frame, kind, key.get(), theirs, twins, lead_keys);
            if (child) {
                beside(frame, i, tree) = Value(std::move(child));
                ++matched;
            } else {
                beside(frame, i, tree) = is_length ? length : misfit(Misfit::absent, tree, spot, std::move(key), false);
            }
        }
        (void)at, (void)in_step;
        if (matched != PyDict_Size(theirs)) add_extras(tree, frame, spot, kind, theirs, twins, is_length ? &length : nullptr);
    }

    Ref find_twin(const Frame &frame, const Kind *kind, PyObject *key, PyObject *theirs, std::vector<Ref> &twins,
                  Ref &lead_keys) {
        Ref other = twin(key);
        if (!other) return Ref();
        Ref child = dict_item(theirs, other.get());
        if (!child) return Ref();
        if (!lead_keys) lead_keys = key_set(frame, kind);
        int taken = PySet_Contains(lead_keys.get(), other.get());
        if (taken < 0) throw PythonError{};
        if (taken) return Ref();
        twins.push_back(std::move(other));
        return child;
    }

    Ref key_set(const Frame &frame, const Kind *kind) {
        Ref keys = Ref::checked(PySet_New(nullptr));
        for (uint32_t i = 0; i < frame.children; ++i)
            if (PySet_Add(keys.get(), child_key(kind, plan_->keys, frame.keys, i).get()) < 0) throw PythonError{};
        return keys;
    }

    // The children that only the follower has, if there is any value in them.
    void add_extras(size_t tree, const Frame &frame, Spot spot, const Kind *kind, PyObject *theirs,
                    const std::vector<Ref> &twins, const Value *length) {
        Ref known = key_set(frame, kind);
        for (const Ref &key : twins)
            if (PySet_Add(known.get(), key.get()) < 0) throw PythonError{};
        Ref items = Ref::checked(PyDict_Items(theirs));
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); ++i) {
            PyObject *key = PyTuple_GET_ITEM(PyList_GET_ITEM(items.get(), i), 0);
            PyObject *child = PyTuple_GET_ITEM(PyList_GET_ITEM(items.get(), i), 1);
            int is_known = PySet_Contains(known.get(), key);
            if (is_known < 0) throw PythonError{};
            if (is_known || !holds_value(child)) continue;
            if (length)
                plan_->differences[length->difference()].confirmed = true;
            else
                misfit(Misfit::extra, tree, spot, Ref::borrow(key), true);
        }
    }

    bool holds_value(PyObject *node) {
        bool numeric = options_.where == Where::isnumeric || options_.where == Where::istrainable;
        Ref answer = Ref::checked(PyObject_CallFunctionObjArgs(
            runtime().holds_value.get(), node, numeric ? Py_True : Py_False, nullptr));
        return answer.get() == Py_True;
    }

    Value misfit(Misfit kind, size_t tree, Spot spot, Ref key, bool confirmed) {
        plan_->differences.push_back({kind, static_cast<uint32_t>(tree), spot, std::move(key), confirmed});
        return Value::absent(static_cast<uint32_t>(plan_->differences.size() - 1));
    }

    void finish() {
        plan_->row.clear();  // it holds the root
        revisit_ties();
        settle_absent();
    }

    // A tied leaf that was asked for at one of its paths is the same leaf at all the others.
    void revisit_ties() {
        if (tied_.empty()) return;
        for (Step &step : plan_->steps) {
            if (step.op != Op::keep) continue;
            int64_t number = tied_.find(step.node.get());
            if (number < 0 && step.number != none) number = tied_.find(plan_->contents[step.number].get());
            if (number >= 0) step = {Op::visit, static_cast<uint32_t>(number), 1, Ref(), nullptr};
        }
    }

    // A value that is still absent at a leaf is a difference; to f it is missing.
    void settle_absent() {
        if (plan_->differences.empty()) return;
        for (Value &value : plan_->values) {
            if (!value.is_absent()) continue;
            plan_->differences[value.difference()].confirmed = true;
            value = missing_value();
        }
    }
};

}  // namespace

PlanPtr align(PyObject *const *trees, size_t count, const Options &options) {
    return Alignment(trees, count, options).take();
}

}  // namespace cowalk
