#include "model/cpu/adapters.h"

#include <algorithm>
#include <utility>

namespace bequest {

std::vector<LoraRows> StepAdapters::at(int64_t site) const {
  std::vector<LoraRows> found;
  for (const Group& group : groups_) {
    const Adapter::Parts* const parts = group.adapter->at(site);
    if (parts == nullptr || group.rows.empty()) continue;
    found.push_back({parts, group.rows.data(), static_cast<int64_t>(group.rows.size())});
  }
  return found;
}

bool StepAdapters::is_at(int64_t site) const {
  return std::any_of(groups_.begin(), groups_.end(), [site](const Group& group) {
    return !group.rows.empty() && group.adapter->at(site) != nullptr;
  });
}

std::vector<StepAdapters::Group> StepAdapters::among(int64_t first_up, int64_t first_down) const {
  std::vector<Group> found;
  for (const Group& group : groups_)
    if (!group.rows.empty() && (group.adapter->is_among(first_up) || group.adapter->is_among(first_down)))
      found.push_back(group);
  return found;
}

int64_t StepAdapters::num_rows_at(int64_t site) const {
  int64_t count = 0;
  for (const LoraRows& group : at(site)) count += group.num_rows;
  return count;
}

AdaptedRows StepAdapters::gather(int64_t site, const float* x, int64_t width) const {
  AdaptedRows found;
  found.groups = at(site);
  for (const LoraRows& group : found.groups)
    found.rows.insert(found.rows.end(), group.rows, group.rows + group.num_rows);
  for (const int64_t row : found.rows) {
    found.places.push_back(static_cast<int64_t>(found.places.size()));
    found.x.insert(found.x.end(), x + row * width, x + (row + 1) * width);
  }
  const int64_t* place = found.places.data();
  for (LoraRows& group : found.groups) {
    group.rows = place;
    place += group.num_rows;
  }
  return found;
}

StepAdapters StepAdapters::of(const int64_t* rows, int64_t num_rows) const {
  std::vector<Group> kept;
  for (const Group& group : groups_) {
    Group left{group.adapter, {}};
    for (const int64_t row : group.rows) {
      const int64_t* const place = std::lower_bound(rows, rows + num_rows, row);
      if (place != rows + num_rows && *place == row) left.rows.push_back(place - rows);
    }
    if (!left.rows.empty()) kept.push_back(std::move(left));
  }
  return StepAdapters(std::move(kept));
}

}  // namespace bequest
