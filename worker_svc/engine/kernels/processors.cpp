// Processing of logits before sampling, as processors.py specifies it.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "vec.h"

namespace {

constexpr int64_t kSerialTokens = 1 << 17;  // tokens below which waking other threads costs more than they save
constexpr uint32_t kInPrompt = 1u << 31;    // in a count: the prompt has the id

// `RECORD` of processors.py.
struct ProcessorRow {
  float repetition_penalty, frequency_penalty, presence_penalty;
  int32_t num_bad_words;
  int64_t prompt_len, banned_before;
  int64_t num_allowed, num_banned, num_early, num_biases;
  const uint32_t *tokens, *allowed, *banned, *early, *bias_ids;
  const float* biases;
  const uint32_t* bad_word_ids;
  const int64_t* bad_word_ends;
};

void keep_allowed(float* logits, int64_t vocab, const ProcessorRow& row) {
  std::vector<float> kept(row.num_allowed);
  for (int64_t i = 0; i < row.num_allowed; i++) kept[i] = logits[row.allowed[i]];
  std::fill(logits, logits + vocab, kNegInf);
  for (int64_t i = 0; i < row.num_allowed; i++) logits[row.allowed[i]] = kept[i];
}

void ban(float* logits, const uint32_t* ids, int64_t count) {
  for (int64_t i = 0; i < count; i++) logits[ids[i]] = kNegInf;
}

void ban_bad_words(float* logits, const ProcessorRow& row, int64_t num_tokens) {
  int64_t begin = 0;
  for (int32_t i = 0; i < row.num_bad_words; i++) {
    const int64_t before = row.bad_word_ends[i] - begin - 1;  // ids before the last one
    const uint32_t* word = row.bad_word_ids + begin;
    const bool is_ending = before <= num_tokens - row.prompt_len &&
                           std::equal(word, word + before, row.tokens + num_tokens - before);
    if (is_ending) logits[word[before]] = kNegInf;
    begin = row.bad_word_ends[i];
  }
}

// `counts` [vocab] is zero before and after. Content ids of the prompt, which are not below `vocab`, have no effect.
void penalize(float* logits, int64_t vocab, const ProcessorRow& row, int64_t num_tokens, uint32_t* counts) {
  const float repetition = row.repetition_penalty;
  const int64_t first = repetition == 1.f ? row.prompt_len : 0;  // the prompt matters for repetition only
  for (int64_t i = first; i < row.prompt_len; i++)
    if (row.tokens[i] < vocab) counts[row.tokens[i]] = kInPrompt;
  for (int64_t i = row.prompt_len; i < num_tokens; i++) counts[row.tokens[i]]++;
  for (int64_t i = first; i < num_tokens; i++) {
    const uint32_t id = row.tokens[i];
    if (id >= vocab || !counts[id]) continue;  // a content id, or done at an earlier occurrence
    const uint32_t count = counts[id] & ~kInPrompt;
    counts[id] = 0;
    float x = logits[id];
    x = x > 0.f ? x / repetition : x * repetition;
    if (count) {
      x -= row.frequency_penalty * float(count);
      x -= row.presence_penalty;
    }
    logits[id] = x;
  }
}

void process_row(float* logits, int64_t vocab, const ProcessorRow& row, int64_t num_tokens) {
  if (row.num_allowed) keep_allowed(logits, vocab, row);
  ban(logits, row.banned, row.num_banned);
  ban_bad_words(logits, row, num_tokens);
  if (num_tokens - row.prompt_len < row.banned_before) ban(logits, row.early, row.num_early);
  for (int64_t i = 0; i < row.num_biases; i++) logits[row.bias_ids[i]] += row.biases[i];
  if (row.repetition_penalty == 1.f && row.frequency_penalty == 0.f && row.presence_penalty == 0.f) return;
  static thread_local std::vector<uint32_t> counts;
  if (int64_t(counts.size()) < vocab) counts.resize(vocab);
  penalize(logits, vocab, row, num_tokens, counts.data());
}

}  // namespace

extern "C" {

// Size of a record, to compare with the caller's.
int64_t quire_processor_row_bytes() { return sizeof(ProcessorRow); }

// Changes n rows of logits [.., vocab] in place: row lines[i], with the record rows[i] and its first num_tokens[i] tokens.
void quire_process_logits(float* logits, int64_t vocab, const ProcessorRow* records, int64_t n, const int64_t* lines,
                          const int64_t* rows, const int64_t* num_tokens, int threads) {
  int64_t work = 0;
  for (int64_t i = 0; i < n; i++) work += num_tokens[i] + records[rows[i]].num_allowed;
  Pass(threads_for(work, kSerialTokens, threads)).run(n, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
      process_row(logits + lines[i] * vocab, vocab, records[rows[i]], num_tokens[i]);
  });
}
}
