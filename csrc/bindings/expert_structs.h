// What of experts Python passes as tuples.
#pragma once

#include <tuple>

#include "bindings/fields.h"
#include "ops/cpu/expert_route.h"
#include "ops/cpu/experts.h"

namespace bequest {

template <>
inline constexpr auto fields_of<RoutingRule> = std::tuple(
    &RoutingRule::top_k, &RoutingRule::scoring, &RoutingRule::bias, &RoutingRule::num_groups,
    &RoutingRule::top_groups, &RoutingRule::group_best, &RoutingRule::renormalises, &RoutingRule::factor);
template <>
inline constexpr auto fields_of<ChosenExperts> = std::tuple(
    &ChosenExperts::ids, &ChosenExperts::weights, &ChosenExperts::num_tokens, &ChosenExperts::top_k);

}  // namespace bequest
