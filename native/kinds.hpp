// Kinds as the native walk sees them: what src/cowalk/tree/kinds.py says of a type, read once and kept.
#pragma once

#include <vector>

#include "refs.hpp"

namespace cowalk {

enum class Shape : uint8_t { leaf, branch, box, nothing };
enum class Layout : uint8_t { python, dict, list, tuple, namedtuple, record, groups };
enum class Plain : uint8_t { dict, list, tuple };

struct Kind {
    Shape shape = Shape::leaf;
    Layout layout = Layout::python;
    Plain plain = Plain::dict;
    bool mapping = false;
    bool shared = false;
    bool ties = false;
    bool sequence() const { return plain != Plain::dict; }

    Ref python;  // the Leaf, Branch, Box or Nothing object
    Ref open, close, finish, trainable, numeric, missing;
    std::vector<Ref> names;
};

// The Python objects that the walk needs from the package, given once by setup().
struct Runtime {
    Ref leaf, branch, box, nothing;  // the four kinds' classes
    Ref missing, index, path, path_where;
    Ref find_kind, isleaf, isnumeric, istrainable;
    Ref holds_value, same, note, wrong_outputs;
    Ref cycle_error, structure_error, tie_error;
    Ref dunder_dict;  // interned "__dict__"
};
Runtime &runtime();

// The kind of a type. Kinds live as long as the process, so the pointer stays good.
// `lasting` says whether the type may be remembered (a type that nobody knows yet may be registered later).
const Kind *find_kind(PyTypeObject *type, bool &lasting);

// Forget which type has which kind (kinds.py calls this when a registration changes).
void forget_kinds();

// Kinds seen lately in one walk: spares the walk most look-ups in the table of all types.
class KindCache {
public:
    const Kind *of(PyObject *object) {
        PyTypeObject *type = Py_TYPE(object);
        Entry &entry = entries_[(reinterpret_cast<uintptr_t>(type) >> 5) % size];
        return entry.type == type ? entry.kind : look_up(type, entry);
    }

private:
    struct Entry {
        PyTypeObject *type = nullptr;
        const Kind *kind = nullptr;
    };
    static constexpr size_t size = 16;
    const Kind *look_up(PyTypeObject *type, Entry &entry);
    Entry entries_[size];
    std::vector<std::pair<Ref, const Kind *>> passing_;  // kinds for this walk only
};

// Make the keys of the first positions, and paths quick to free (plan.cpp); setup() does it once.
void prepare_paths();

PyObject *setup(PyObject *module, PyObject *objects);

}  // namespace cowalk
