#include "cache/swap.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "core/check.h"

namespace bequest {

// The one that may rewrite the entries of tables.
class TableSwap {
 public:
  explicit TableSwap(const std::vector<BlockTable*>& tables) : tables_(tables) {
    std::unordered_set<const BlockTable*> seen;
    for (const BlockTable* table : tables) {
      check(seen.insert(table).second, "a table is named twice in one swap");
      check(table->pool_ == tables[0]->pool_, "tables of one swap are from one pool");
    }
  }

  void expect_device(const std::shared_ptr<BlockPool>& device) const {
    for (const BlockTable* table : tables_)
      check(table->pool_ == device, "a table goes back to its own pool");
  }

  void expect_host(const std::shared_ptr<BlockPool>& host) const {
    for (const BlockTable* table : tables_) {
      check(table->pool_ != host, "the host pool is not the device pool");
      check(table->pool_->block_size() == host->block_size(), "the pools differ in block size");
      check(table->resident() || table->host_ == host, "a table is already in another host pool");
    }
  }

  std::shared_ptr<BlockPool> common_host() const {
    std::shared_ptr<BlockPool> host;
    for (const BlockTable* table : tables_) {
      if (table->resident()) continue;
      check(host == nullptr || host == table->host_, "tables of one swap are in one host pool");
      host = table->host_;
    }
    return host;
  }

  // Counts the references that `tables` have on each entry of the device (sign 1) or of the host (-1), and
  // lists these entries as they first occur.
  void count_uses(int32_t sign) {
    for (const BlockTable* table : tables_) {
      for (const int32_t entry : table->entries_) {
        if (entry * sign > 0 && ++moves_[entry].uses == 1) order_.push_back(entry);
      }
    }
  }

  template <class Keep>
  void select(Keep keep) {
    std::erase_if(order_, [&](int32_t entry) {
      if (keep(entry, moves_.at(entry).uses)) return false;
      moves_.erase(entry);
      return true;
    });
  }

  // Keeps the last `most` of the selected entries: tails are shared less than heads.
  void keep_last(size_t most) {
    if (order_.size() <= most) return;
    const auto end = order_.end() - static_cast<std::ptrdiff_t>(most);
    for (auto it = order_.begin(); it != end; ++it) moves_.erase(*it);
    order_.erase(order_.begin(), end);
  }

  void expect_written(const BlockPool& from) const {
    for (const int32_t entry : order_)
      check(!from.pending(entry), "a block that this plan writes was swapped out");
  }

  size_t num_moves() const { return order_.size(); }

  // Takes a block of `to` for every selected one of `from`, with as many references as the tables have on it.
  std::vector<BlockCopy> move(BlockPool& from, BlockPool& to, int32_t target_sign) {
    std::vector<BlockCopy> copies;
    copies.reserve(order_.size());
    for (const int32_t entry : order_) {
      Move& move = moves_.at(entry);
      const BlockId target = to.allocate();
      to.note_arrival(target, from, std::abs(entry));
      for (int32_t i = 1; i < move.uses; ++i) to.acquire(target);
      move.target = target_sign * target;
      copies.push_back({std::abs(entry), target});
    }
    return copies;
  }

  void rewrite_tables(const std::shared_ptr<BlockPool>& host) {
    for (BlockTable* table : tables_) {
      table->num_on_host_ = 0;
      for (int32_t& entry : table->entries_) {
        if (const auto it = moves_.find(entry); it != moves_.end()) entry = it->second.target;
        table->num_on_host_ += entry < 0;
      }
      table->host_ = table->num_on_host_ > 0 ? host : nullptr;
    }
  }

  // Calls give_back(block) for every reference that was moved away; tails first, as in BlockTable::free().
  template <class GiveBack>
  void release_moved(GiveBack give_back) const {
    for (auto it = order_.rbegin(); it != order_.rend(); ++it) {
      for (int32_t i = 0; i < moves_.at(*it).uses; ++i) give_back(std::abs(*it));
    }
  }

 private:
  struct Move {
    int32_t uses = 0;
    int32_t target = 0;
  };

  const std::vector<BlockTable*>& tables_;
  std::unordered_map<int32_t, Move> moves_;
  std::vector<int32_t> order_;
};

int64_t count_distinct_blocks(const std::vector<BlockTable*>& tables) {
  std::unordered_set<int32_t> entries;
  for (const BlockTable* table : tables) entries.insert(table->entries().begin(), table->entries().end());
  entries.erase(kNullBlock);
  return static_cast<int64_t>(entries.size());
}

namespace {

// Selects what nobody but the swap's tables holds.
void select_own(TableSwap& swap, const BlockPool& device, const std::shared_ptr<BlockPool>& host) {
  swap.expect_host(host);
  swap.count_uses(1);
  swap.select([&](int32_t entry, int32_t uses) { return device.ref_count(entry) == uses; });
}

std::vector<BlockCopy> move_out(TableSwap& swap, BlockPool& device, const std::shared_ptr<BlockPool>& host) {
  swap.expect_written(device);
  const auto copies = swap.move(device, *host, -1);
  swap.rewrite_tables(host);
  swap.release_moved([&](BlockId block) { device.release(block); });
  return copies;
}

}  // namespace

std::optional<std::vector<BlockCopy>> try_swap_out(const std::vector<BlockTable*>& tables,
                                                   const std::shared_ptr<BlockPool>& host) {
  if (tables.empty()) return std::vector<BlockCopy>{};
  TableSwap swap(tables);
  BlockPool& device = tables[0]->pool();
  select_own(swap, device, host);
  if (static_cast<int64_t>(swap.num_moves()) > host->num_free()) return std::nullopt;
  return move_out(swap, device, host);
}

std::vector<BlockCopy> swap_out_some(const std::vector<BlockTable*>& tables,
                                     const std::shared_ptr<BlockPool>& host, int64_t most) {
  if (tables.empty()) return {};
  TableSwap swap(tables);
  BlockPool& device = tables[0]->pool();
  select_own(swap, device, host);
  swap.select([&](int32_t entry, int32_t) { return !device.pending(entry); });
  swap.keep_last(static_cast<size_t>(std::clamp<int64_t>(most, 0, host->num_free())));
  if (swap.num_moves() == 0) return {};
  return move_out(swap, device, host);
}

std::optional<std::vector<BlockCopy>> try_swap_in(const std::vector<BlockTable*>& tables,
                                                  const std::shared_ptr<BlockPool>& device) {
  if (tables.empty()) return std::vector<BlockCopy>{};
  TableSwap swap(tables);
  swap.expect_device(device);
  const std::shared_ptr<BlockPool> host = swap.common_host();
  swap.count_uses(-1);
  if (static_cast<int64_t>(swap.num_moves()) > device->num_free()) return std::nullopt;
  if (swap.num_moves() == 0) return std::vector<BlockCopy>{};
  const auto copies = swap.move(*host, *device, 1);
  swap.rewrite_tables(nullptr);
  swap.release_moved([&](BlockId block) { host->release_source(block); });
  return copies;
}

}  // namespace bequest
