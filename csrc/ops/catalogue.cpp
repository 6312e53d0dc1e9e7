#include "ops/catalogue.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <string>
#include <thread>

#include "core/check.h"

namespace bequest {
namespace {

// f(worker) on threads of their own, the caller's included.
template <class F>
void on_threads(int num_threads, F&& f) {
  std::vector<std::jthread> others;
  for (int i = 1; i < num_threads; ++i) others.emplace_back([&f, i] { f(i); });
  f(0);
}

// f(begin, end) over chunks of [0, count), handed out in turn.
template <class F>
void for_chunks(int64_t count, int64_t grain, int num_threads, F&& f) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int) {
    for (int64_t begin; (begin = next.fetch_add(grain)) < count;) f(begin, std::min(begin + grain, count));
  };
  on_threads(static_cast<int>(std::min<int64_t>(num_threads, (count + grain - 1) / grain)), work);
}

constexpr int64_t kGrain = 1 << 16;

// An item on its way into the tree: its next token above its index. Sorting these sorts by token.
using Entry = uint64_t;

Entry make_entry(int32_t token, uint32_t item) {
  return static_cast<Entry>(static_cast<uint32_t>(token)) << 32 | item;
}
int32_t token_of(Entry entry) { return static_cast<int32_t>(entry >> 32); }
uint32_t item_of(Entry entry) { return static_cast<uint32_t>(entry); }

void sort_in_pieces(std::span<Entry> entries, int num_threads) {
  const auto size = static_cast<int64_t>(entries.size());
  const auto edge = [&](int64_t piece) { return entries.begin() + size * piece / num_threads; };
  on_threads(num_threads, [&](int piece) { std::sort(edge(piece), edge(piece + 1)); });
  for (int run = 1; run < num_threads; run *= 2) {
    const int pairs = (num_threads + 2 * run - 1) / (2 * run);
    on_threads(pairs, [&](int pair) {
      const int first = 2 * run * pair;
      std::inplace_merge(edge(first), edge(std::min(first + run, num_threads)),
                         edge(std::min(first + 2 * run, num_threads)));
    });
  }
}

// Each segment [starts[i], starts[i + 1]) by itself.
void sort_segments(std::span<Entry> entries, std::span<const uint32_t> starts, int num_threads) {
  constexpr uint32_t kLarge = 1 << 20;
  const auto size_of = [&](int64_t i) { return starts[i + 1] - starts[i]; };
  const auto num_segments = static_cast<int64_t>(starts.size()) - 1;
  for (int64_t i = 0; i < num_segments; ++i)
    if (size_of(i) >= kLarge) sort_in_pieces(entries.subspan(starts[i], size_of(i)), num_threads);
  for_chunks(num_segments, 64, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      if (size_of(i) > 1 && size_of(i) < kLarge)
        std::sort(entries.begin() + starts[i], entries.begin() + starts[i + 1]);
  });
}

int64_t first_bad_item(const CatalogueItems& items, int32_t vocab_size, int num_threads) {
  const auto is_bad = [&](int64_t item) {
    int64_t level = 0;
    for (int32_t token; (token = items.token(item, level)) != -1; ++level)
      if (token < 0 || token >= vocab_size) return true;
    if (level == 0) return true;
    if (items.offsets != nullptr) return items.offsets[item] + level != items.offsets[item + 1];
    for (; level < items.width; ++level)
      if (items.token(item, level) != -1) return true;
    return false;
  };
  std::atomic<int64_t> first{items.num_items};
  for_chunks(items.num_items, kGrain, num_threads, [&](int64_t begin, int64_t end) {
    int64_t item = begin;
    while (item < end && !is_bad(item)) ++item;
    int64_t known = first.load();
    while (item < end && item < known && !first.compare_exchange_weak(known, item)) {
    }
  });
  return first.load();
}

void check_items(const CatalogueItems& items, int32_t vocab_size, int num_threads) {
  check(items.num_items > 0, "catalogue: no items");
  check(items.num_items < std::numeric_limits<int32_t>::max(), "catalogue: too many items");
  if (items.offsets != nullptr)
    for (int64_t i = 0; i < items.num_items; ++i)
      check(items.offsets[i] <= items.offsets[i + 1], "catalogue: offsets descend");
  const int64_t bad = first_bad_item(items, vocab_size, num_threads);
  if (bad < items.num_items)
    fail("catalogue: item " + std::to_string(bad) +
         " is empty, has a token outside the vocabulary, or has tokens behind its padding");
}

// Level by level: the items of each node are sorted by their next token, and every run of equal tokens is a
// child.
class Builder {
 public:
  Builder(const CatalogueItems& items, int num_threads)
      : items_(items), num_threads_(num_threads), entries_(items.num_items) {
    starts_ = {0, static_cast<uint32_t>(items.num_items)};
    for_chunks(items.num_items, kGrain, num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) entries_[i] = make_entry(items.token(i, 0), i);
    });
  }

  void run() {
    tokens.push_back(-1);
    for (int64_t level = 1; !entries_.empty(); ++level) {
      sort_segments(entries_, starts_, num_threads_);
      add_children();
      read_tokens(level);
      drop_ended();
    }
    check(tokens.size() <= std::numeric_limits<int32_t>::max(), "catalogue: too many nodes");
    first_child.push_back(static_cast<int32_t>(tokens.size()));
    if (!any_terminal_) terminal.clear();
    terminal.resize(any_terminal_ ? (first_child.size() + 30) / 32 : 0);
    for (auto* array : {&tokens, &first_child}) array->shrink_to_fit();
  }

  std::vector<int32_t> tokens;
  std::vector<int32_t> first_child;
  std::vector<uint32_t> terminal;
  int64_t num_items = 0;

 private:
  // Nodes of the next level; starts_ become theirs.
  void add_children() {
    std::vector<uint32_t> child_starts;
    for (size_t node = 0; node + 1 < starts_.size(); ++node) {
      first_child.push_back(static_cast<int32_t>(tokens.size()));
      for (uint32_t i = starts_[node]; i < starts_[node + 1]; ++i) {
        const int32_t token = token_of(entries_[i]);
        if (i > starts_[node] && token == token_of(entries_[i - 1])) continue;
        child_starts.push_back(i);
        tokens.push_back(token);
      }
    }
    child_starts.push_back(static_cast<uint32_t>(entries_.size()));
    starts_ = std::move(child_starts);
  }

  void read_tokens(int64_t level) {
    for_chunks(static_cast<int64_t>(entries_.size()), kGrain, num_threads_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const uint32_t item = item_of(entries_[i]);
        entries_[i] = make_entry(items_.token(item, level), item);
      }
    });
  }

  // Items that end at their node leave; the node is terminal.
  void drop_ended() {
    const size_t first_node = tokens.size() - (starts_.size() - 1);
    uint32_t kept = 0;
    for (size_t node = 0; node + 1 < starts_.size(); ++node) {
      const uint32_t begin = starts_[node];
      const uint32_t end = starts_[node + 1];
      starts_[node] = kept;
      bool ends = false;
      for (uint32_t i = begin; i < end; ++i) {
        if (token_of(entries_[i]) == -1)
          ends = true;
        else
          entries_[kept++] = entries_[i];
      }
      num_items += ends;
      if (ends && kept > starts_[node]) mark_terminal(first_node + node);
    }
    starts_.back() = kept;
    entries_.resize(kept);
  }

  void mark_terminal(size_t node) {
    any_terminal_ = true;
    if (terminal.size() <= node / 32) terminal.resize(node / 32 + 1);
    terminal[node / 32] |= 1u << (node % 32);
  }

  const CatalogueItems& items_;
  const int num_threads_;
  std::vector<Entry> entries_;    // of items that have not ended, those of a node together
  std::vector<uint32_t> starts_;  // where each node of the last level begins in them, and the end
  bool any_terminal_ = false;
};

}  // namespace

Catalogue::Catalogue(const CatalogueItems& items, int32_t vocab_size, int num_threads)
    : vocab_size_(vocab_size) {
  check(num_threads >= 1, "catalogue: no threads");
  check_items(items, vocab_size, num_threads);
  Builder builder(items, num_threads);
  builder.run();
  num_items_ = builder.num_items;
  tokens_ = std::move(builder.tokens);
  first_child_ = std::move(builder.first_child);
  terminal_ = std::move(builder.terminal);
}

CatalogueView Catalogue::view() const {
  return {tokens_.data(), first_child_.data(), terminal_.empty() ? nullptr : terminal_.data(),
          static_cast<int32_t>(tokens_.size()), static_cast<int32_t>(first_child_.size()) - 1};
}

void Catalogue::check_node(int32_t node) const {
  if (!view().contains(node)) fail("catalogue: no node " + std::to_string(node));
}

int32_t Catalogue::child(int32_t node, int32_t token) const {
  check_node(node);
  return view().child(node, token);
}

std::span<const int32_t> Catalogue::children(int32_t node) const {
  check_node(node);
  const CatalogueView tree = view();
  return {tree.tokens + tree.begin(node), tree.tokens + tree.end(node)};
}

bool Catalogue::is_terminal(int32_t node) const {
  check_node(node);
  return view().is_terminal(node);
}

int64_t Catalogue::num_bytes() const {
  return static_cast<int64_t>(sizeof(int32_t) * (tokens_.size() + first_child_.size() + terminal_.size()));
}

}  // namespace bequest
