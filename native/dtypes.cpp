#include "dtypes.hpp"

#include <cfloat>

namespace cowalk {

namespace {

// How a type of eight bits or fewer means its numbers.
enum class Special {
    ieee,      // the largest exponent holds infinities and NaN
    all_ones,  // NaN is all ones but for the sign; no infinity ("fn")
    minus_zero,  // NaN is what would be −0; no infinity ("fnuz")
    none,
};

struct Format {
    int code, exponent_bits, mantissa_bits, bias;
    Special special;
};

// Codes 7 to 17 of DLPack 1.1, the formats of ml_dtypes and of torch.
constexpr Format FORMATS[] = {
    {7, 3, 4, 3, Special::ieee},          // float8_e3m4
    {8, 4, 3, 7, Special::ieee},          // float8_e4m3
    {9, 4, 3, 11, Special::minus_zero},   // float8_e4m3b11fnuz
    {10, 4, 3, 7, Special::all_ones},     // float8_e4m3fn
    {11, 4, 3, 8, Special::minus_zero},   // float8_e4m3fnuz
    {12, 5, 2, 15, Special::ieee},        // float8_e5m2
    {13, 5, 2, 16, Special::minus_zero},  // float8_e5m2fnuz
    {15, 2, 3, 1, Special::none},         // float6_e2m3fn
    {16, 3, 2, 3, Special::none},         // float6_e3m2fn
    {17, 2, 1, 1, Special::none},         // float4_e2m1fn
};
constexpr int FORMAT_COUNT = sizeof FORMATS / sizeof *FORMATS;
constexpr int POWERS_OF_TWO = 14;  // float8_e8m0fnu: an exponent and nothing else

float value_of(const Format &format, int byte) {
    const int magnitude_bits = format.exponent_bits + format.mantissa_bits;
    const int magnitude = byte & ((1 << magnitude_bits) - 1);
    const bool negative = byte >> magnitude_bits & 1;
    const int exponent = magnitude >> format.mantissa_bits, mantissa = magnitude & ((1 << format.mantissa_bits) - 1);
    const int largest = (1 << format.exponent_bits) - 1;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    switch (format.special) {
    case Special::ieee:
        if (exponent == largest) return mantissa ? nan : negative ? -HUGE_VALF : HUGE_VALF;
        break;
    case Special::all_ones:
        if (magnitude == (1 << magnitude_bits) - 1) return nan;
        break;
    case Special::minus_zero:
        if (negative && magnitude == 0) return nan;
        break;
    case Special::none:
        break;
    }
    const int scale = (exponent ? exponent : 1) - format.bias - format.mantissa_bits;
    const float value = std::ldexp(static_cast<float>(mantissa + (exponent ? 1 << format.mantissa_bits : 0)), scale);
    return negative ? -value : value;
}

struct Tables {
    float values[FORMAT_COUNT + 1][256];
    Tables() {
        for (int i = 0; i < FORMAT_COUNT; ++i)
            for (int byte = 0; byte < 256; ++byte) values[i][byte] = value_of(FORMATS[i], byte);
        for (int byte = 0; byte < 255; ++byte) values[FORMAT_COUNT][byte] = std::ldexp(1.0f, byte - 127);
        values[FORMAT_COUNT][255] = std::numeric_limits<float>::quiet_NaN();
    }
};

const Tables &tables() {
    static const Tables made;
    return made;
}

}  // namespace

bool describe_type(int code, Array &array, int &size) {
    switch (code) {
    case type_code(2, 16): array.type = Type::f16, array.tiny = 0x1p-14, size = 2; return true;
    case type_code(4, 16): array.type = Type::bf16, array.tiny = FLT_MIN, size = 2; return true;
    case type_code(2, 32): array.type = Type::f32, array.tiny = FLT_MIN, size = 4; return true;
    case type_code(2, 64): array.type = Type::f64, array.tiny = DBL_MIN, size = 8; return true;
    case type_code(5, 64): array.type = Type::c64, array.tiny = FLT_MIN, size = 8; return true;
    case type_code(5, 128): array.type = Type::c128, array.tiny = DBL_MIN, size = 16; return true;
    default: break;
    }
    size = 1;
    array.type = Type::byte;
    if (code == type_code(POWERS_OF_TWO, 8)) {
        array.values = tables().values[FORMAT_COUNT];
        array.tiny = 0;
        return true;
    }
    for (int i = 0; i < FORMAT_COUNT; ++i) {
        if (code != type_code(FORMATS[i].code, 8)) continue;
        array.values = tables().values[i];
        array.tiny = std::ldexp(1.0, 1 - FORMATS[i].bias);
        return true;
    }
    array.type = Type::absent;
    return false;
}

}  // namespace cowalk
