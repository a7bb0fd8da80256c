// Which types of numbers the kernels read, by the codes that DLPack gives them.
#pragma once

#include "measure.hpp"

namespace cowalk {

// A DLPack type: its code and its bits, as one number.
constexpr int type_code(int code, int bits) { return code << 8 | bits; }

// Whether the type can be read; fills in all of `array` but its data. `size` is the bytes of an element.
bool describe_type(int code, Array &array, int &size);

}  // namespace cowalk
