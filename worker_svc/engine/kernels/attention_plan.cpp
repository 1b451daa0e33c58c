// Divides the attention of a batch into tasks.
//
// A decoding row has few query vectors, which read each of its keys once. Rows whose first blocks are the same (a common
// prompt) are therefore one task, in which the keys of these blocks meet the query vectors of all of them. Each query
// vector goes through the same operations as alone, so the division changes no result.
#include <algorithm>

#include "attention_latents.h"

namespace {

// The division of one batch.
class Planner {
 public:
  // `query_tile`: query vectors of a span. Only spans of up to kQueryTile of them can share keys.
  Planner(const AttentionRows& rows, const QkvShape& shape, int threads, int64_t query_tile, bool can_share)
      : rows_(rows),
        shape_(shape),
        threads_(threads),
        group_(shape.q_heads / shape.kv_heads),
        query_tile_(query_tile),
        can_share_(can_share) {}

  // `count` tokens of a row, starting with its token `first`.
  void add(int32_t row, int64_t first, int64_t count) {
    const int64_t end = (first + count) * group_;
    for (int64_t i = first * group_; i < end; i += query_tile_) {
      const int64_t queries = std::min<int64_t>(query_tile_, end - i);
      const Span span{row, int32_t(i), int32_t(queries), rows_.num_keys(row, (i + queries - 1) / group_)};
      can_share(span) ? sharing_.push_back(span) : add_task({span}, 0);
    }
  }

  AttentionPlan finish() {
    std::sort(sharing_.begin(), sharing_.end(), [&](const Span& a, const Span& b) {
      const int64_t common = common_blocks(a, b), bs = shape_.block_size;
      const bool has_a = common * bs < a.num_keys, has_b = common * bs < b.num_keys;
      return has_a && has_b ? block(a, common) < block(b, common) : has_b;
    });
    const int64_t even = int64_t(sharing_.size()) * shape_.kv_heads / (2 * threads_);  // leaves tasks for all threads
    for (size_t first = 0, next; first < sharing_.size(); first = next) {
      int64_t shared = shareable(sharing_[first].num_keys);
      int64_t queries = sharing_[first].queries;
      for (next = first + 1; next < sharing_.size() && int64_t(next - first) < even; next++) {
        queries += sharing_[next].queries;  // spans of prompts have more of them than decoding rows
        if (queries > kSharingQueries) break;
        const int64_t fewer = std::min(shared, shared_keys(sharing_[first], sharing_[next]));
        const int64_t num = next - first;  // the keys that are read once less must not become fewer
        if (!fewer || fewer * num < shared * (num - 1)) break;
        shared = fewer;
      }
      add_task({sharing_.begin() + first, sharing_.begin() + next}, next - first > 1 ? shared : 0);
    }
    return std::move(plan_);
  }

 private:
  bool can_share(const Span& span) const { return can_share_ && 2 * span.queries <= kSharingQueries && shareable(span.num_keys) > 0; }

  // Whole tiles of keys, of which one key at least stays unshared.
  static int64_t shareable(int64_t num_keys) { return (num_keys - 1) / kKeyTile * kKeyTile; }

  int32_t block(const Span& span, int64_t i) const { return rows_.table(span.row)[i]; }

  int64_t common_blocks(const Span& a, const Span& b) const {
    const int32_t *x = rows_.table(a.row), *y = rows_.table(b.row);
    const int64_t count = (std::min(a.num_keys, b.num_keys) + shape_.block_size - 1) / shape_.block_size;
    return std::mismatch(x, x + count, y).first - x;
  }

  int64_t shared_keys(const Span& a, const Span& b) const {
    const int64_t keys = std::min(shareable(a.num_keys), shareable(b.num_keys));
    return std::min(keys, common_blocks(a, b) * shape_.block_size / kKeyTile * kKeyTile);
  }

  void add_task(const std::vector<Span>& spans, int64_t shared_keys) {
    const int64_t first = plan_.spans.size(), count = spans.size();
    plan_.spans.insert(plan_.spans.end(), spans.begin(), spans.end());
    for (int32_t head = 0; head < shape_.kv_heads; head++) plan_.tasks.push_back({head, first, count, shared_keys});
  }

  const AttentionRows& rows_;
  const QkvShape& shape_;
  const int64_t threads_, group_, query_tile_;
  const bool can_share_;
  std::vector<Span> sharing_;
  AttentionPlan plan_;
};

// The plan of all tokens, or of `tokens`, which are ascending; null: all.
AttentionPlan plan_of(Planner planner, const AttentionRows& rows, const int64_t* tokens, int64_t num_tokens) {
  if (!tokens) {
    for (int32_t b = 0; b < rows.count; b++) planner.add(b, 0, rows.query_starts[b + 1] - rows.query_starts[b]);
    return planner.finish();
  }
  int32_t row = 0;
  for (int64_t i = 0, next; i < num_tokens; i = next) {
    while (rows.query_starts[row + 1] <= tokens[i]) row++;
    for (next = i + 1; next < num_tokens && tokens[next] == tokens[next - 1] + 1; next++)
      if (tokens[next] == rows.query_starts[row + 1]) break;
    planner.add(row, tokens[i] - rows.query_starts[row], next - i);
  }
  return planner.finish();
}

}  // namespace

AttentionPlan plan_attention(const AttentionRows& rows, const QkvShape& shape, int threads, const int64_t* tokens,
                             int64_t num_tokens) {
  return plan_of(Planner(rows, shape, threads, kQueryTile, true), rows, tokens, num_tokens);
}

// A span holds all heads of a token if there are enough tokens for all threads.
AttentionPlan plan_latents(const AttentionRows& rows, int64_t heads, int threads, const int64_t* tokens,
                           int64_t num_tokens) {
  const int64_t vectors = heads * (tokens ? num_tokens : int64_t(rows.query_starts[rows.count]));
  const int64_t most = std::clamp<int64_t>(heads, kMostLatentQueries / 2, kMostLatentQueries);
  const int64_t query_tile = std::clamp<int64_t>((vectors + threads - 1) / threads, kLanes, most);
  return plan_of(Planner(rows, {heads, 1, 0, 1}, threads, query_tile, false), rows, tokens, num_tokens);
}
