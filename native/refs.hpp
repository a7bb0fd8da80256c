// Owned references to Python objects, and small tables of pointers.
#pragma once

#include <Python.h>

#include <cstdint>
#include <utility>
#include <vector>

// Iterating over a dict needs a lock where there is no GIL. No user code runs between these two.
#ifdef Py_GIL_DISABLED
#define COWALK_LOCK(object) Py_BEGIN_CRITICAL_SECTION(object)
#define COWALK_UNLOCK() Py_END_CRITICAL_SECTION()
#else
#define COWALK_LOCK(object) {
#define COWALK_UNLOCK() }
#endif

namespace cowalk {

// A Python exception is set; unwinds to the entry point, which returns NULL.
struct PythonError {};

// An owned reference, or nothing.
class Ref {
public:
    Ref() = default;
    static Ref steal(PyObject *object) { return Ref(object); }
    static Ref borrow(PyObject *object) {
        Py_XINCREF(object);
        return Ref(object);
    }
    // The result of a call into Python: NULL means that an exception is set.
    static Ref checked(PyObject *object) {
        if (!object) throw PythonError{};
        return Ref(object);
    }
    Ref(const Ref &other) : object_(other.object_) { Py_XINCREF(object_); }
    Ref(Ref &&other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Ref &operator=(Ref other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() { Py_XDECREF(object_); }

    PyObject *get() const { return object_; }
    PyObject *release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

private:
    explicit Ref(PyObject *object) : object_(object) {}
    PyObject *object_ = nullptr;
};

// What a tree has at a place: an object (owned), or "absent because of difference number n". One word, so that the values
// of a leaf lie side by side as a call to f wants them.
class Value {
public:
    Value() = default;
    explicit Value(Ref ref) : bits_(reinterpret_cast<uintptr_t>(ref.release())) {}
    static Value absent(uint32_t difference) {
        Value value;
        value.bits_ = (static_cast<uintptr_t>(difference) << 1) | 1;
        return value;
    }
    static Value borrow(PyObject *object) { return Value(Ref::borrow(object)); }
    Value(const Value &other) : bits_(other.bits_) {
        if (!is_absent()) Py_XINCREF(get());
    }
    Value(Value &&other) noexcept : bits_(std::exchange(other.bits_, 0)) {}
    Value &operator=(Value other) noexcept {
        std::swap(bits_, other.bits_);
        return *this;
    }
    ~Value() {
        if (!is_absent()) Py_XDECREF(get());
    }

    bool is_absent() const { return bits_ & 1; }
    uint32_t difference() const { return static_cast<uint32_t>(bits_ >> 1); }
    PyObject *get() const { return reinterpret_cast<PyObject *>(bits_); }

private:
    uintptr_t bits_ = 0;
};
static_assert(sizeof(Value) == sizeof(PyObject *));

// A hash table from addresses to numbers, with open addressing and linear probing.
class AddressMap {
public:
    bool empty() const { return size_ == 0; }
    // The number stored for an address, or -1.
    int64_t find(const void *address) const {
        if (slots_.empty()) return -1;
        for (size_t i = hash(address);; i = (i + 1) & mask_) {
            if (slots_[i].address == address) return slots_[i].number;
            if (!slots_[i].address) return -1;
        }
    }
    void add(const void *address, int64_t number) {
        if (2 * (size_ + 1) > slots_.size()) grow();
        place(address, number);
        ++size_;
    }
    void erase(const void *address) {
        size_t hole = hash(address);
        while (slots_[hole].address != address) hole = (hole + 1) & mask_;
        // Move later keys of the cluster back over the hole, as long as that brings them no nearer than their home slot.
        for (size_t i = (hole + 1) & mask_; slots_[i].address; i = (i + 1) & mask_) {
            size_t from_home = (i - hash(slots_[i].address)) & mask_;
            if (from_home >= ((i - hole) & mask_)) {
                slots_[hole] = slots_[i];
                hole = i;
            }
        }
        slots_[hole].address = nullptr;
        --size_;
    }
    // The number stored for an address; `number` is stored and returned if there was none.
    int64_t find_or_add(const void *address, int64_t number) {
        int64_t found = find(address);
        if (found < 0) add(address, number);
        return found < 0 ? number : found;
    }

private:
    struct Slot {
        const void *address = nullptr;
        int64_t number = 0;
    };
    size_t hash(const void *address) const {
        uint64_t bits = reinterpret_cast<uintptr_t>(address) >> 4;
        return static_cast<size_t>((bits * 0x9E3779B97F4A7C15ull) >> 32) & mask_;
    }
    void place(const void *address, int64_t number) {
        size_t i = hash(address);
        while (slots_[i].address) i = (i + 1) & mask_;
        slots_[i] = {address, number};
    }
    void grow() {
        std::vector<Slot> old = std::move(slots_);
        slots_.assign(old.empty() ? 32 : 2 * old.size(), Slot{});
        mask_ = slots_.size() - 1;
        for (const Slot &slot : old)
            if (slot.address) place(slot.address, slot.number);
    }
    std::vector<Slot> slots_;
    size_t mask_ = 0;
    size_t size_ = 0;
};

}  // namespace cowalk
