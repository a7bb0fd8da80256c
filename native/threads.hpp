// Work shared out over threads, in the floating-point mode that numbers are measured and added in.
#pragma once

#include <atomic>
#include <cfenv>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace cowalk {

// The default floating-point mode for the time of one measurement: a mode that flushes subnormal numbers would drop them.
class PlainArithmetic {
  public:
    PlainArithmetic() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~PlainArithmetic() { std::fesetenv(&before_); }
    PlainArithmetic(const PlainArithmetic &) = delete;
    PlainArithmetic &operator=(const PlainArithmetic &) = delete;

  private:
    std::fenv_t before_;
};

// How many threads are worth starting: work below ELEMENTS_A_THREAD is done before a thread has started.
constexpr std::int64_t ELEMENTS_A_THREAD = 1 << 17;
inline int threads_for(std::int64_t elements, int most) {
    const std::int64_t worth = elements / ELEMENTS_A_THREAD + 1;
    return most < 1 ? 1 : worth < most ? static_cast<int>(worth) : most;
}

// Calls work(i) for all i below `count` on several threads; the calling one is among them.
template <class Work> void share_out(std::size_t count, int threads, Work work) {
    std::atomic<std::size_t> next{0};
    const auto go = [&] {
        const PlainArithmetic mode;
        for (std::size_t i = next++; i < count; i = next++) work(i);
    };
    std::vector<std::thread> others;
    others.reserve(threads);
    for (int i = 1; i < threads; ++i) {
        try {
            others.emplace_back(go);
        } catch (const std::system_error &) {  // no more threads to be had: fewer do it too
            break;
        }
    }
    go();
    for (std::thread &other : others) other.join();
}

}  // namespace cowalk
