#include "cache/block_table.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/check.h"

namespace bequest {

BlockTable::BlockTable(std::shared_ptr<BlockPool> pool, std::string salt)
    : pool_(std::move(pool)), salt_(std::move(salt)) {
  check(pool_ != nullptr, "a table needs a pool");
}

BlockTable BlockTable::adopt(std::shared_ptr<BlockPool> pool, std::string salt, const BlockEpochs& blocks) {
  BlockTable table(std::move(pool), std::move(salt));
  const auto strips = static_cast<size_t>(table.num_strips());
  check(blocks.size() % strips == 0, "what is adopted is rows of blocks");
  table.entries_.reserve(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto [block, epoch] = blocks[i];
    if (block != kNullBlock && table.pool_->try_revive(block, epoch)) {
      table.entries_.push_back(block);
    } else if (table.strips().is_whole(static_cast<int32_t>(i % strips))) {
      table.drop_to(i / strips * strips);
      break;
    } else {
      table.entries_.push_back(kNullBlock);
    }
  }
  return table;
}

int64_t BlockTable::rows_covering(int64_t num_tokens) const {
  check(num_tokens >= 0, "a count of tokens is not negative");
  const int64_t bs = pool_->block_size();
  return (num_tokens + bs - 1) / bs;
}

// Counts in each strip the blocks at the end of a growing path that are there without a gap.
class PathRuns {
 public:
  explicit PathRuns(const BlockPool& pool) : pool_(pool), runs_(pool.strips().count()) {}

  void add(NodeId node) {
    ++length_;
    for (size_t s = 0; s < runs_.size(); ++s) {
      const BlockId block = pool_.index()->block(node, static_cast<int32_t>(s));
      runs_[s] = block == kNullBlock ? 0 : runs_[s] + 1;
    }
  }

  // Whether a sequence can go on behind the path.
  bool serves() const {
    const int64_t end = length_ * pool_.block_size();
    for (size_t s = 0; s < runs_.size(); ++s) {
      if (runs_[s] < length_ - pool_.strips().first_seen(static_cast<int32_t>(s), end)) return false;
    }
    return true;
  }

 private:
  const BlockPool& pool_;
  std::vector<int64_t> runs_;
  int64_t length_ = 0;
};

int64_t BlockTable::match_prefix(const TokenList& tokens, int64_t limit) {
  check(entries_.empty(), "only an empty table can match a prefix");
  const PrefixIndex* index = pool_->index();
  if (index == nullptr) return 0;
  const int64_t bs = pool_->block_size();
  const int64_t known = std::min<int64_t>(limit, tokens.size());
  PrefixIndex::Parent parent = index->find_root(salt_);
  PathRuns runs(*pool_);
  std::vector<NodeId> path;
  size_t longest = 0;
  for (int64_t end = bs; end <= known && parent != PrefixIndex::kNoParent; end += bs) {
    const NodeId node = index->find(parent, tokens.data() + end - bs);
    if (node == kNoNode) break;
    path.push_back(node);
    runs.add(node);
    if (runs.serves()) longest = path.size();
    parent = node;
  }
  path.resize(longest);
  take_rows(path);
  return capacity();
}

void BlockTable::take_rows(const std::vector<NodeId>& nodes) {
  const PrefixIndex& index = *pool_->index();
  const int64_t end = static_cast<int64_t>(nodes.size()) * pool_->block_size();
  for (size_t row = 0; row < nodes.size(); ++row) {
    chain_.push_back(index.ref(nodes[row]));
    for (int32_t s = 0; s < num_strips(); ++s) {
      const BlockId block = index.block(nodes[row], s);
      const bool taken = block != kNullBlock && is_kept(static_cast<int64_t>(row), s, end);
      entries_.push_back(taken ? block : kNullBlock);
      if (taken) pool_->acquire(block);
    }
  }
}

int64_t BlockTable::match_partial(const TokenList& tokens, int64_t limit) {
  check(static_cast<int64_t>(chain_.size()) == num_rows() && resident(),
        "a partial match follows match_prefix()");
  const PrefixIndex* index = pool_->index();
  if (index == nullptr) return 0;
  const int64_t bs = pool_->block_size();
  const int64_t begin = capacity();
  const int64_t known = std::min({limit, static_cast<int64_t>(tokens.size()), begin + bs - 1});
  const PrefixIndex::Parent parent = chain_.empty() ? index->find_root(salt_) : chain_.back().node;
  if (known <= begin || parent == PrefixIndex::kNoParent) return 0;
  if (!chain_.empty() && !index->alive(chain_.back())) return 0;

  const int32_t* wanted = tokens.data() + begin;
  auto [node, length] = index->best_child(parent, wanted, static_cast<int32_t>(known - begin));
  if (length < known - begin && begin + bs <= static_cast<int64_t>(tokens.size())) {
    // The scan is bounded. If `limit` alone hid a full match, the hash finds it among any number of children.
    const NodeId exact = index->find(parent, wanted);
    if (exact != kNoNode && index->serves_inside(exact)) {
      std::tie(node, length) = std::pair(exact, static_cast<int32_t>(known - begin));
    }
  }
  if (length == 0) return 0;
  for (int32_t s = 0; s < num_strips(); ++s) {
    const BlockId block = index->block(node, s);
    if (block != kNullBlock && pool_->pending(block)) return 0;
  }
  for (int32_t s = 0; s < num_strips(); ++s) {
    const BlockId block = entries_.emplace_back(index->block(node, s));
    if (block != kNullBlock) pool_->acquire(block);
  }
  return length;
}

void BlockTable::keep(const Keeping& keeping) {
  keeping_ = keeping;
  num_slid_.clear();
}

bool BlockTable::is_kept(int64_t row, int32_t strip, int64_t position) const {
  return row >= strips().first_kept(strip, position) || strips().is_marked(strip, row, keeping_);
}

void BlockTable::slide(int64_t position) {
  const Strips& strips = this->strips();
  if (!strips.slides() || keeping_.what == Keeping::What::kAll) return;
  num_slid_.resize(strips.count());
  for (int32_t s = 0; s < strips.count(); ++s) {
    const int64_t end = std::min(strips.first_kept(s, position), num_rows());
    for (int64_t& row = num_slid_[s]; row < end; ++row) {
      int32_t& entry = entries_[row * strips.count() + s];
      if (entry == kNullBlock || strips.is_marked(s, row, keeping_)) continue;
      num_on_host_ -= entry < 0;
      release_entry(std::exchange(entry, kNullBlock));
    }
  }
  if (num_on_host_ == 0) host_.reset();
}

// The most tokens up to `limit` behind which the strip has what a token sees: a gap in it means to end
// before.
int64_t BlockTable::last_served(int32_t strip, int64_t limit) const {
  if (strips().sees_itself_alone(strip)) return limit;
  int64_t position = limit;
  for (int64_t row = rows_covering(limit) - 1; row >= strips().first_seen(strip, position); --row) {
    if (entry(row, strip) == kNullBlock) position = row * pool_->block_size();
    if (position == 0) break;
  }
  return position;
}

int64_t BlockTable::servable(int64_t limit) const {
  int64_t position = std::min(limit, capacity());
  if (!strips().slides()) return position;
  for (int64_t before = -1; before != position;) {
    before = position;
    for (int32_t s = 0; s < num_strips(); ++s) {
      if (!strips().is_whole(s)) position = last_served(s, position);
    }
  }
  return position;
}

int64_t BlockTable::copyable(int64_t num_tokens) const {
  const int64_t inside = num_tokens % pool_->block_size();
  if (inside == 0) return num_tokens;
  int64_t settled = inside;
  for (int32_t s = 0; s < num_strips(); ++s) {
    const int32_t last = entry(num_tokens / pool_->block_size(), s);
    if (last > 0) settled = std::min<int64_t>(settled, pool_->settled_slots(last));
  }
  return num_tokens - inside + settled;
}

int32_t BlockTable::blocks_needed(int64_t begin, int64_t end) const {
  check(0 <= begin && begin <= end, "positions [begin, end) are not an interval");
  check(begin <= capacity(), "a write would leave a gap behind the table's last block");
  check(resident(), "a table that was swapped out cannot be written");
  if (begin == end) return 0;
  const int64_t strips = num_strips();
  const auto there = static_cast<int64_t>(entries_.size());
  const int64_t last = rows_covering(end) * strips;
  int64_t needed = std::max<int64_t>(0, last - there);
  for (int64_t i = begin / pool_->block_size() * strips; i < std::min(last, there); ++i) {
    needed += entries_[i] == kNullBlock || !pool_->writable(entries_[i]);
  }
  return static_cast<int32_t>(needed);
}

int64_t BlockTable::blocks_to_reach(int64_t computed, int64_t num_tokens) const {
  const int64_t rows = num_rows(), row = computed / pool_->block_size();
  const int64_t last = std::max(rows_covering(num_tokens), rows_covering(computed));
  int64_t needed = num_on_host_;
  for (int32_t s = 0; s < num_strips(); ++s) {
    needed += strips().most_growth(s, std::max<int64_t>(0, last - rows), keeping_);
    if (resident()) continue;
    const int32_t copied = computed % pool_->block_size() > 0 ? entry(row, s) : kNullBlock;
    needed += copied > 0 && pool_->ref_count(copied) > 1;
  }
  if (resident() && num_tokens > computed)
    needed += blocks_needed(computed, std::min(num_tokens, capacity()));
  return needed;
}

// Gives entry i a block of its own; the old one is copied if slots before `begin` must be kept.
BlockId BlockTable::replace_for_write(size_t i, int32_t begin, std::vector<BlockCopy>& copies) {
  const BlockId source = entries_[i];
  const BlockId fresh = pool_->allocate();
  entries_[i] = fresh;
  if (begin > 0) {
    copies.push_back({source, fresh});
    pool_->release_source(source);
  } else {
    pool_->release(source);
  }
  return fresh;
}

// Slots [begin, end) of entry i are written next.
void BlockTable::prepare_entry(size_t i, int32_t begin, int32_t end, std::vector<BlockCopy>& copies) {
  BlockId block;
  if (i == entries_.size()) {
    block = entries_.emplace_back(pool_->allocate());
  } else if (entries_[i] == kNullBlock) {
    block = entries_[i] = pool_->allocate();
    begin = 0;  // nobody reads what is before it
  } else if (pool_->writable(entries_[i])) {
    block = entries_[i];
  } else {
    check(begin <= pool_->settled_slots(entries_[i]),
          "slots that this plan writes would have to be copied before");
    block = replace_for_write(i, begin, copies);
    begin = 0;  // what is copied is not there for another copy of this plan either
  }
  pool_->note_write(block, begin, end);
}

std::optional<std::vector<BlockCopy>> BlockTable::try_prepare_write(int64_t begin, int64_t end) {
  if (strips().slides()) slide(begin);
  const int32_t needed = blocks_needed(begin, end);
  if (needed > pool_->num_free()) return std::nullopt;
  std::vector<BlockCopy> copies;
  prepare_write(begin, end, copies);
  return copies;
}

void BlockTable::prepare_write(int64_t begin, int64_t end, std::vector<BlockCopy>& copies) {
  if (begin == end) return;
  const int64_t bs = pool_->block_size(), strips = num_strips();
  const int64_t first = begin / bs;
  const int64_t last = rows_covering(end);
  const auto size = static_cast<size_t>(last * strips);
  if (size > entries_.capacity()) {  // an exact reserve would copy all entries for each block
    entries_.reserve(std::max(size, 2 * entries_.capacity()));
  }
  chain_.resize(std::min<size_t>(chain_.size(), first));
  for (int64_t row = first; row < last; ++row) {
    const auto from = static_cast<int32_t>(std::max<int64_t>(0, begin - row * bs));
    const auto to = static_cast<int32_t>(std::min(bs, end - row * bs));
    for (int64_t s = 0; s < strips; ++s) prepare_entry(row * strips + s, from, to, copies);
  }
}

bool BlockTable::try_append(const std::vector<bool>& present, int64_t num_tokens) {
  const int64_t strips = num_strips(), bs = pool_->block_size();
  const int64_t first = num_rows();
  check(static_cast<int64_t>(present.size()) == (rows_covering(num_tokens) - first) * strips,
        "rows are appended whole");
  if (std::count(present.begin(), present.end(), true) > pool_->num_free()) return false;
  for (size_t i = 0; i < present.size(); ++i) {
    const int64_t row = first + static_cast<int64_t>(i) / strips;
    const BlockId block = entries_.emplace_back(present[i] ? pool_->allocate() : kNullBlock);
    if (present[i]) pool_->note_write(block, 0, static_cast<int32_t>(std::min(bs, num_tokens - row * bs)));
  }
  return true;
}

// False if the row cannot enter, because a block of it is already known under another history.
bool BlockTable::commit_row(size_t row, const int32_t* tokens) {
  PrefixIndex& index = *pool_->index();
  PrefixIndex::Parent parent = row == 0 ? index.find_root(salt_) : chain_[row - 1].node;
  NodeId node = parent == PrefixIndex::kNoParent ? kNoNode : index.find(parent, tokens);
  const int32_t* entries = entries_.data() + row * num_strips();
  const auto enters = [&](int32_t s) {
    return entries[s] != kNullBlock && !index.contains(entries[s]) &&
           (node == kNoNode || index.block(node, s) == kNullBlock);
  };
  for (int32_t s = 0; s < num_strips(); ++s) {
    if (node == kNoNode && strips().is_whole(s) && !enters(s)) return false;
    check(!enters(s) || pool_->full(entries[s]),
          "a block that is not fully written cannot enter the prefix index");
  }
  if (node == kNoNode) {
    if (index.is_full()) return false;
    if (parent == PrefixIndex::kNoParent) parent = index.make_root(salt_);
    node = index.insert(parent, tokens);
  }
  for (int32_t s = 0; s < num_strips(); ++s) {
    if (enters(s)) index.put(node, s, entries[s]);
  }
  chain_.push_back(index.ref(node));
  return true;
}

void BlockTable::commit(const TokenList& tokens, int64_t num_computed) {
  check(resident(), "a table that was swapped out cannot be committed");
  PrefixIndex* index = pool_->index();
  if (index == nullptr) return;
  const int64_t bs = pool_->block_size();
  const auto full = std::min<int64_t>(num_computed, tokens.size()) / bs;
  check(full <= num_rows(), "more tokens were computed than the table has room for");
  // A node that was another sequence's may have left with its block, and everything below it left too.
  while (!chain_.empty() && !index->alive(chain_.back())) chain_.pop_back();
  for (auto row = static_cast<int64_t>(chain_.size()); row < full; ++row) {
    if (!commit_row(row, tokens.data() + row * bs)) break;
  }
  // Rows that slid out before they were entered may have left a node that serves nobody.
  if (!strips().keeps_some_whole() && !chain_.empty()) index->prune(chain_.back().node);
}

// Whether a node stands for blocks of this table, as far as that can still be known.
bool BlockTable::owns_row(size_t row, NodeId node) const {
  bool slid = true;
  for (int32_t s = 0; s < num_strips(); ++s) {
    const int32_t mine = entry(static_cast<int64_t>(row), s);
    if (mine != kNullBlock && mine == pool_->index()->block(node, s)) return true;
    slid = slid && mine == kNullBlock;
  }
  return slid;
}

void BlockTable::uncommit(int64_t from_token) {
  check(from_token >= 0, "a count of tokens is not negative");
  const auto first = static_cast<size_t>(from_token / pool_->block_size());
  PrefixIndex* index = pool_->index();
  for (size_t row = first; row < chain_.size(); ++row) {
    if (index->alive(chain_[row]) && owns_row(row, chain_[row].node)) index->erase(chain_[row].node);
  }
  chain_.resize(std::min(chain_.size(), first));
}

BlockTable BlockTable::slice_to(int64_t num_tokens) const {
  const int64_t count = rows_covering(num_tokens);
  check(count <= num_rows(), "the table is shorter than the slice");
  BlockTable table(pool_, salt_);
  table.host_ = host_;
  table.keeping_ = keeping_;
  table.num_slid_ = num_slid_;
  for (int64_t& row : table.num_slid_) row = std::min(row, count);
  table.entries_.assign(entries_.begin(), entries_.begin() + count * num_strips());
  for (const int32_t entry : table.entries_) {
    acquire_entry(entry);
    table.num_on_host_ += entry < 0;
  }
  const auto full = static_cast<size_t>(num_tokens / pool_->block_size());
  table.chain_.assign(chain_.begin(), chain_.begin() + std::min(chain_.size(), full));
  return table;
}

BlockTable BlockTable::split_tail() {
  check(resident() && !strips().slides(), "only a table of whole strips on the device can be split");
  const auto rows = static_cast<size_t>(std::max<int64_t>(0, num_rows() - 1));
  const auto first = static_cast<std::ptrdiff_t>(std::max(rows, chain_.size()) * num_strips());
  BlockTable tail(pool_, {});
  tail.entries_.assign(entries_.begin() + first, entries_.end());
  entries_.resize(first);
  return tail;
}

void BlockTable::append(const BlockTable& tail) {
  check(pool_ == tail.pool_ && resident() && tail.resident(), "tables of one pool are joined on the device");
  entries_.insert(entries_.end(), tail.entries_.begin(), tail.entries_.end());
  for (const int32_t entry : tail.entries_) acquire_entry(entry);
}

void BlockTable::truncate(int64_t num_tokens) {
  const int64_t count = rows_covering(num_tokens);
  check(count <= num_rows(), "a table cannot be truncated to more than it holds");
  drop_to(count * num_strips());
  for (int64_t& row : num_slid_) row = std::min(row, count);
  chain_.resize(std::min<size_t>(chain_.size(), num_tokens / pool_->block_size()));
}

void BlockTable::share_front(const BlockTable& other, int32_t count) {
  check(pool_ == other.pool_, "tables of two pools share nothing");
  check(0 <= count && count <= std::min(num_rows(), other.num_rows()), "a table is shorter than the front");
  for (int32_t i = 0; i < count * num_strips(); ++i) {
    const int32_t mine = entries_[i], theirs = other.entries_[i];
    if (mine == theirs || mine == kNullBlock || theirs == kNullBlock) continue;
    check(theirs > 0 || host_ == nullptr || host_ == other.host_, "a table is already in another host pool");
    other.acquire_entry(theirs);
    release_entry(mine);
    entries_[i] = theirs;
    num_on_host_ += (theirs < 0) - (mine < 0);
    if (theirs < 0) host_ = other.host_;
  }
  if (num_on_host_ == 0) host_.reset();
}

void BlockTable::free() {
  drop_to(0);
  chain_.clear();
  num_slid_.clear();
}

void BlockTable::drop_to(size_t num_entries) {
  while (entries_.size() > num_entries) {
    num_on_host_ -= entries_.back() < 0;
    release_entry(entries_.back());
    entries_.pop_back();
  }
  if (num_on_host_ == 0) host_.reset();
}

void BlockTable::acquire_entry(int32_t entry) const {
  if (entry > 0) {
    pool_->acquire(entry);
  } else if (entry < 0) {
    host_->acquire(-entry);
  }
}

void BlockTable::release_entry(int32_t entry) const {
  if (entry > 0) {
    pool_->release(entry);
  } else if (entry < 0) {
    host_->release(-entry);
  }
}

int32_t BlockTable::num_held() const {
  if (!strips().slides()) return static_cast<int32_t>(entries_.size());
  return static_cast<int32_t>(entries_.size() - std::count(entries_.begin(), entries_.end(), kNullBlock));
}

int32_t BlockTable::num_shared() const {
  return static_cast<int32_t>(std::count_if(entries_.begin(), entries_.end(), [&](int32_t entry) {
    if (entry == kNullBlock) return false;
    return (entry > 0 ? pool_->ref_count(entry) : host_->ref_count(-entry)) > 1;
  }));
}

size_t BlockTable::num_known(size_t most) const {
  const auto strips = static_cast<size_t>(num_strips());
  most = std::min(most, entries_.size());
  for (size_t i = 0; i < most; ++i) {
    const bool known = entries_[i] > 0 || !this->strips().is_whole(static_cast<int32_t>(i % strips));
    if (!known) return i / strips * strips;
  }
  return most;
}

BlockEpochs BlockTable::epochs(size_t begin, size_t end) const {
  BlockEpochs epochs;
  epochs.reserve(end - begin);
  for (size_t i = begin; i < end; ++i) {
    const bool here = entries_[i] > 0;
    epochs.push_back({here ? entries_[i] : kNullBlock, here ? pool_->epoch(entries_[i]) : 0});
  }
  return epochs;
}

}  // namespace bequest
