#include "cache/block_table.h"

#include <algorithm>
#include <tuple>

#include "core/check.h"

namespace bequest {

BlockTable::BlockTable(std::shared_ptr<BlockPool> pool, std::string salt)
    : pool_(std::move(pool)), salt_(std::move(salt)) {
  check(pool_ != nullptr, "a table needs a pool");
}

BlockTable BlockTable::adopt(std::shared_ptr<BlockPool> pool, std::string salt, const BlockEpochs& blocks) {
  BlockTable table(std::move(pool), std::move(salt));
  table.entries_.reserve(blocks.size());
  for (const auto [block, epoch] : blocks) {
    if (!table.pool_->try_revive(block, epoch)) break;
    table.entries_.push_back(block);
  }
  return table;
}

int64_t BlockTable::blocks_covering(int64_t num_tokens) const {
  check(num_tokens >= 0, "a count of tokens is not negative");
  const int64_t bs = pool_->block_size();
  return (num_tokens + bs - 1) / bs;
}

int64_t BlockTable::match_prefix(const TokenList& tokens, int64_t limit) {
  check(entries_.empty(), "only an empty table can match a prefix");
  const PrefixIndex* index = pool_->index();
  if (index == nullptr) return 0;
  const int64_t bs = pool_->block_size();
  const int64_t known = std::min<int64_t>(limit, tokens.size());
  PrefixIndex::Parent parent = index->find_root(salt_);
  for (int64_t end = bs; end <= known && parent != PrefixIndex::kNoParent; end += bs) {
    const BlockId block = index->find(parent, tokens.data() + end - bs);
    if (block == kNullBlock) break;
    entries_.push_back(block);
    chain_.push_back(index->ref(block));
    pool_->acquire(block);
    parent = block;
  }
  return capacity();
}

int64_t BlockTable::match_partial(const TokenList& tokens, int64_t limit) {
  check(chain_.size() == entries_.size() && resident(), "a partial match follows match_prefix()");
  const PrefixIndex* index = pool_->index();
  if (index == nullptr) return 0;
  const int64_t bs = pool_->block_size();
  const int64_t begin = capacity();
  const int64_t known = std::min({limit, static_cast<int64_t>(tokens.size()), begin + bs - 1});
  const PrefixIndex::Parent parent = chain_.empty() ? index->find_root(salt_) : chain_.back().block;
  if (known <= begin || parent == PrefixIndex::kNoParent) return 0;
  if (!chain_.empty() && !index->alive(chain_.back())) return 0;

  const int32_t* wanted = tokens.data() + begin;
  auto [block, length] = index->best_child(parent, wanted, static_cast<int32_t>(known - begin));
  if (length < known - begin && begin + bs <= static_cast<int64_t>(tokens.size())) {
    // The scan is bounded. If `limit` alone hid a full match, the hash finds it among any number of children.
    const BlockId exact = index->find(parent, wanted);
    if (exact != kNullBlock) std::tie(block, length) = std::pair(exact, static_cast<int32_t>(known - begin));
  }
  if (length == 0 || pool_->pending(block)) return 0;
  entries_.push_back(block);
  pool_->acquire(block);
  return length;
}

int32_t BlockTable::blocks_needed(int64_t begin, int64_t end) const {
  check(0 <= begin && begin <= end, "positions [begin, end) are not an interval");
  check(begin <= capacity(), "a write would leave a gap behind the table's last block");
  check(resident(), "a table that was swapped out cannot be written");
  if (begin == end) return 0;
  const int64_t last = blocks_covering(end);
  int64_t needed = std::max<int64_t>(0, last - num_blocks());
  for (int64_t i = begin / pool_->block_size(); i < std::min<int64_t>(last, num_blocks()); ++i) {
    needed += !pool_->writable(entries_[i]);
  }
  return static_cast<int32_t>(needed);
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

std::optional<std::vector<BlockCopy>> BlockTable::try_prepare_write(int64_t begin, int64_t end) {
  const int32_t needed = blocks_needed(begin, end);
  if (needed > pool_->num_free()) return std::nullopt;
  std::vector<BlockCopy> copies;
  if (begin == end) return copies;

  const int64_t bs = pool_->block_size();
  const int64_t first = begin / bs;
  const int64_t last = blocks_covering(end);
  if (begin % bs > 0 && begin % bs > pool_->settled_slots(entries_[first])) {
    check(pool_->writable(entries_[first]), "slots that this plan writes would have to be copied before");
  }
  if (static_cast<size_t>(last) >
      entries_.capacity()) {  // an exact reserve would copy all entries for each block
    entries_.reserve(std::max<size_t>(last, 2 * entries_.capacity()));
  }
  chain_.resize(std::min<size_t>(chain_.size(), first));
  for (int64_t i = first; i < last; ++i) {
    auto from = static_cast<int32_t>(std::max<int64_t>(0, begin - i * bs));
    const auto to = static_cast<int32_t>(std::min(bs, end - i * bs));
    BlockId block;
    if (i == num_blocks()) {
      block = entries_.emplace_back(pool_->allocate());
    } else if (pool_->writable(entries_[i])) {
      block = entries_[i];
    } else {
      block = replace_for_write(i, from, copies);
      from = 0;  // what is copied is not there for another copy of this plan either
    }
    pool_->note_write(block, from, to);
  }
  return copies;
}

// False if the block cannot enter, because it is already known under another history.
bool BlockTable::commit_block(size_t i, const int32_t* tokens) {
  PrefixIndex& index = *pool_->index();
  PrefixIndex::Parent parent = i == 0 ? index.find_root(salt_) : chain_[i - 1].block;
  if (parent != PrefixIndex::kNoParent) {
    if (const BlockId equal = index.find(parent, tokens); equal != kNullBlock) {
      chain_.push_back(index.ref(equal));
      return true;
    }
  }
  const BlockId block = entries_[i];
  if (index.contains(block)) return false;
  check(pool_->full(block), "a block that is not fully written cannot enter the prefix index");
  if (parent == PrefixIndex::kNoParent) parent = index.make_root(salt_);
  index.insert(parent, tokens, block);
  chain_.push_back(index.ref(block));
  return true;
}

void BlockTable::commit(const TokenList& tokens, int64_t num_computed) {
  check(resident(), "a table that was swapped out cannot be committed");
  const PrefixIndex* index = pool_->index();
  if (index == nullptr) return;
  const int64_t bs = pool_->block_size();
  const auto full = static_cast<size_t>(std::min<int64_t>(num_computed, tokens.size()) / bs);
  check(full <= entries_.size(), "more tokens were computed than the table has room for");
  // A node that was another sequence's may have left with its block, and everything below it left too.
  while (!chain_.empty() && !index->alive(chain_.back())) chain_.pop_back();
  for (size_t i = chain_.size(); i < full; ++i) {
    if (!commit_block(i, tokens.data() + i * bs)) return;
  }
}

void BlockTable::uncommit(int64_t from_token) {
  check(from_token >= 0, "a count of tokens is not negative");
  const auto first = static_cast<size_t>(from_token / pool_->block_size());
  PrefixIndex* index = pool_->index();
  for (size_t i = first; i < chain_.size(); ++i) {
    if (chain_[i].block == entries_[i] && index->alive(chain_[i])) index->erase(entries_[i]);
  }
  chain_.resize(std::min(chain_.size(), first));
}

BlockTable BlockTable::slice_to(int64_t num_tokens) const {
  const int64_t count = blocks_covering(num_tokens);
  check(count <= num_blocks(), "the table is shorter than the slice");
  BlockTable table(pool_, salt_);
  table.host_ = host_;
  table.entries_.assign(entries_.begin(), entries_.begin() + count);
  for (const int32_t entry : table.entries_) {
    acquire_entry(entry);
    table.num_on_host_ += entry < 0;
  }
  const auto full = static_cast<size_t>(num_tokens / pool_->block_size());
  table.chain_.assign(chain_.begin(), chain_.begin() + std::min(chain_.size(), full));
  return table;
}

void BlockTable::truncate(int64_t num_tokens) {
  const int64_t count = blocks_covering(num_tokens);
  check(count <= num_blocks(), "a table cannot be truncated to more than it holds");
  drop_to(count);
  chain_.resize(std::min<size_t>(chain_.size(), num_tokens / pool_->block_size()));
}

void BlockTable::share_front(const BlockTable& other, int32_t count) {
  check(pool_ == other.pool_, "tables of two pools share nothing");
  check(0 <= count && count <= std::min(num_blocks(), other.num_blocks()),
        "a table is shorter than the front");
  for (int32_t i = 0; i < count; ++i) {
    const int32_t mine = entries_[i], theirs = other.entries_[i];
    if (mine == theirs) continue;
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
  } else {
    host_->acquire(-entry);
  }
}

void BlockTable::release_entry(int32_t entry) const {
  if (entry > 0) {
    pool_->release(entry);
  } else {
    host_->release(-entry);
  }
}

int32_t BlockTable::num_shared() const {
  return static_cast<int32_t>(std::count_if(entries_.begin(), entries_.end(), [&](int32_t entry) {
    return (entry > 0 ? pool_->ref_count(entry) : host_->ref_count(-entry)) > 1;
  }));
}

BlockEpochs BlockTable::epochs() const {
  BlockEpochs epochs;
  epochs.reserve(entries_.size());
  for (const int32_t entry : entries_) {
    if (entry < 0) break;
    epochs.push_back({entry, pool_->epoch(entry)});
  }
  return epochs;
}

}  // namespace bequest
