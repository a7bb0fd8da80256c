// Leaves are cut into runs, runs are handed to threads, and what comes back is merged in the order of the runs.
#include "measure.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "layout.hpp"
#include "threads.hpp"

namespace cowalk {

namespace {

Line blank(const Leaf &leaf) {
    Line line;
    double *all = reinterpret_cast<double *>(&line);
    std::fill(all, all + LINE_WIDTH, NONE);
    for (int k = 0; k < 3; ++k)
        if (leaf.arrays[k].present()) line.moments[k] = no_moments();
    if (leaf.arrays[GRADIENT].present()) line.pairs[0] = no_pair();
    if (leaf.arrays[UPDATE].present()) line.pairs[1] = no_pair();
    if (leaf.has_adam) line.adam = no_adam();
    return line;
}

void merge_lines(Line &into, const Line &from, const Leaf &leaf) {
    for (int k = 0; k < 3; ++k)
        if (leaf.arrays[k].present()) merge(into.moments[k], from.moments[k]);
    if (leaf.arrays[GRADIENT].present()) merge(into.pairs[0], from.pairs[0]);
    if (leaf.arrays[UPDATE].present()) merge(into.pairs[1], from.pairs[1]);
    if (leaf.has_adam) merge(into.adam, from.adam);
}

struct Run {
    std::size_t leaf;
    std::int64_t begin, end;
    Line *line;
};

}  // namespace

void measure(const std::vector<Leaf> &leaves, const std::vector<Rows> &rows, Kernel kernel, int threads, Line *lines,
             std::vector<Histogram> *histograms) {
    std::vector<Run> runs;
    std::vector<std::pair<std::size_t, std::size_t>> parts;  // (leaf, which of the extra lines is its first)
    std::size_t extra = 0;
    std::int64_t elements = 0;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
        lines[i] = blank(leaves[i]);
        elements += leaves[i].n;
        if (leaves[i].n > RUN) extra += static_cast<std::size_t>((leaves[i].n + RUN - 1) / RUN);
    }
    std::vector<Line> partial(extra);
    std::size_t used = 0;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
        if (leaves[i].n == 0) continue;
        if (leaves[i].n <= RUN) {
            runs.push_back({i, 0, leaves[i].n, &lines[i]});
            continue;
        }
        parts.emplace_back(i, used);
        for (std::int64_t begin = 0; begin < leaves[i].n; begin += RUN, ++used) {
            partial[used] = blank(leaves[i]);
            runs.push_back({i, begin, std::min(begin + RUN, leaves[i].n), &partial[used]});
        }
    }

    threads = threads_for(elements, threads);
    std::mutex counting;
    share_out(runs.size(), threads, [&](std::size_t i) {
        const Run &run = runs[i];
        if (!histograms) return kernel(leaves[run.leaf], run.begin, run.end, *run.line, nullptr);
        Powers powers;
        kernel(leaves[run.leaf], run.begin, run.end, *run.line, &powers);
        const std::lock_guard<std::mutex> lock(counting);
        for (int k = 0; k < 3; ++k) (*histograms)[run.leaf].add(k, powers.counts[k]);
    });

    const PlainArithmetic mode;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const std::size_t stop = i + 1 < parts.size() ? parts[i + 1].second : extra;
        for (std::size_t part = parts[i].second; part < stop; ++part)
            merge_lines(lines[parts[i].first], partial[part], leaves[parts[i].first]);
    }
    share_out(rows.size(), std::min<int>(threads, static_cast<int>(rows.size())), [&](std::size_t i) {
        Moments &moments = lines[rows[i].leaf].moments[rows[i].operand];
        if (moments.n > 0 && moments.zeros >= static_cast<double>(rows[i].length())) moments.zero_rows = rows[i].count_zero();
    });
}

void Histogram::add(int operand, const std::uint64_t *powers) {
    int first = 0, last = POWERS;
    while (first < POWERS && powers[first] == 0) ++first;
    while (last > first && powers[last - 1] == 0) --last;
    if (first == last) return;
    std::vector<std::uint64_t> &mine = counts[operand];
    if (mine.empty()) {
        low[operand] = first;
        mine.assign(powers + first, powers + last);
        return;
    }
    if (first < low[operand]) {
        mine.insert(mine.begin(), low[operand] - first, 0);
        low[operand] = first;
    }
    if (last - low[operand] > static_cast<int>(mine.size())) mine.resize(last - low[operand]);
    for (int i = first; i < last; ++i) mine[i - low[operand]] += powers[i];
}

}  // namespace cowalk
