// The plan of a walk: what src/cowalk/tree/reference.py calls Plan, laid out in flat arrays.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kinds.hpp"

namespace cowalk {

constexpr uint32_t none = UINT32_MAX;

enum class Ties : uint8_t { share, sum, first, each };
enum class Where : uint8_t { isleaf, isnumeric, istrainable, predicate, path_predicate };
enum class Missing : uint8_t { skip, pass, error, make };

struct Options {
    Where where = Where::isleaf;
    PyObject *where_object = nullptr;  // borrowed
    Missing missing = Missing::skip;
    PyObject *missing_object = nullptr;  // borrowed; the function for Missing::make
    bool strict = true;
    Ties ties = Ties::share;

    bool only_leaves() const { return where < Where::predicate; }
};

// A place in the lead: a child of an opened node, by number. The root is {none, none}.
struct Spot {
    uint32_t parent = none;
    uint32_t number = none;
};

// An opened node of the lead.
struct Place {
    Spot spot;
    uint32_t keys;  // where its children's keys begin in `keys`; none: they are positions, or the kind's names
    Ref node;
    const Kind *kind;
};

struct Wrapped {
    Ref box;
    const Kind *kind;
};

struct Visit {
    Spot spot;
    uint32_t boxes_begin = 0, boxes_count = 0;
    bool tied = false;     // its object may stand at several places
    bool skipped = false;  // a value is missing, and the policy is to skip
};

enum class Op : uint8_t { visit, keep, close, close_box };

struct Step {
    Op op;
    uint32_t number = 0;  // visit: its number; keep: of its content in `contents`, or none; close: of its place
    uint32_t count = 0;   // visit: how many visits follow one another; close: how many children
    Ref node;  // keep, close_box
    const Kind *kind = nullptr;
};

enum class Misfit : uint8_t { absent, extra, length, leaf, branch, missing };

struct Difference {
    Misfit kind;
    uint32_t tree;
    Spot spot;
    Ref key;
    bool confirmed;
};

// A branch of the lead that is being gone through.
struct Frame {
    uint32_t place;
    uint32_t keys;      // as Place::keys
    uint32_t children;  // how many
    uint32_t next = 0;
    size_t rows;  // where its rows begin in `pending`: for each child, its value in every tree
    uint32_t boxes_begin, boxes_count;
    Ref allowed;  // with istrainable: the keys that may be trained, or nothing for all
};

struct Plan {
    size_t trees = 0;
    std::vector<Step> steps;
    std::vector<Visit> visits;
    std::vector<Value> values;  // visits × trees
    std::vector<Wrapped> boxes;
    std::vector<Ref> keys;
    std::vector<Ref> contents;
    std::vector<Place> places;
    std::vector<std::pair<uint32_t, Spot>> other_spots;  // of tied visits
    std::vector<Difference> differences;
    std::vector<Ref> tie_errors;
    bool some_missing = false;  // some value may be missing

    // What the descent and the building work on. It lives here so that its memory is used again.
    std::vector<Frame> frames;
    std::vector<Value> pending;  // rows of open frames
    std::vector<Value> row;      // the values of the node being looked at, in every tree
    std::vector<Ref> results;    // of f: one tree's after the other's
    std::vector<Ref> stack;

    // Forget everything but the memory, which the next walk uses again.
    void clear();
    PyObject *value(uint32_t visit, size_t tree) const { return values[visit * trees + tree].get(); }
    // What stands in a visit's place if f is not called.
    PyObject *kept(uint32_t visit) const {
        const Visit &v = visits[visit];
        return v.boxes_count ? boxes[v.boxes_begin].box.get() : value(visit, 0);
    }
    Ref path(Spot spot) const;
    Ref key(Spot spot) const;  // nothing for the root
    Ref raw_differences(bool all) const;  // list of (kind, tree, path, key); without `all` only those fatal to a lax walk
    int traverse(visitproc visit, void *arg) const;
};

// The key of position i in a list or tuple.
Ref position_key(Py_ssize_t i);

// The key of a child by its number, however its node stores keys.
inline Ref child_key(const Kind *kind, const std::vector<Ref> &keys, uint32_t begin, uint32_t number) {
    if (begin != none) return keys[begin + number];
    return kind->layout == Layout::namedtuple ? kind->names[number] : position_key(number);
}

// A plan to fill, from those that this thread has used before if there is one.
struct PlanReturner {
    void operator()(Plan *plan) const;
};
using PlanPtr = std::unique_ptr<Plan, PlanReturner>;
PlanPtr new_plan();

// Go down the lead beside its followers. Throws PythonError (CycleError, or whatever user code raises).
PlanPtr align(PyObject *const *trees, size_t count, const Options &options);

// Raise what `align` found, and apply the policy for missing values.
void settle(Plan &plan, const Options &options, PyObject *trees);

PyObject *fmap(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *walk(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *differences(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

Options read_options(PyObject *where, PyObject *missing, PyObject *strict, PyObject *ties);
// The arguments a visit hands to f or to the user, with missing values made by the policy that is a function.
std::vector<Value> filled(const Plan &plan, uint32_t visit, const Options &options);
bool add_walk_type(PyObject *module);

}  // namespace cowalk
