// Dropout's coin flips, many at a time, bit for bit those of PyTorch's CPU generator.
//
// PyTorch flips one coin an element: two outputs of the Mersenne Twister make 53 bits, which are compared with the
// probability as a floating-point number, one after the other. Here a whole turn of the twister (624 outputs) is made,
// tempered and compared in vector registers. The coins and the state left behind are the same.

#include <cstdint>

namespace {

constexpr int kWords = 624;
constexpr int kShift = 397;
constexpr std::uint64_t kBits53 = (std::uint64_t{1} << 53) - 1;

// What torch.get_rng_state() gives, as far as the twister is concerned.
struct State {
  std::uint64_t seed;
  std::int32_t left;  // one more than the outputs that remain of this turn
  std::int32_t seeded;
  std::uint64_t next;
  std::uint64_t words[kWords];
};

inline std::uint32_t twisted(std::uint32_t high, std::uint32_t low) {
  const std::uint32_t mixed = (high & 0x80000000u) | (low & 0x7fffffffu);
  return (mixed >> 1) ^ (-(low & 1u) & 0x9908b0dfu);
}

void turn(std::uint32_t* words) {
#pragma GCC ivdep
  for (int i = 0; i < kWords - kShift; ++i) words[i] = words[i + kShift] ^ twisted(words[i], words[i + 1]);
#pragma GCC ivdep
  for (int i = kWords - kShift; i < kWords - 1; ++i) {
    words[i] = words[i + kShift - kWords] ^ twisted(words[i], words[i + 1]);
  }
  words[kWords - 1] = words[kShift - 1] ^ twisted(words[kWords - 1], words[0]);
}

inline std::uint32_t tempered(std::uint32_t word) {
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680u;
  word ^= (word << 15) & 0xefc60000u;
  return word ^ (word >> 18);
}

inline bool comes_up(std::uint32_t first, std::uint32_t second, std::uint64_t below) {
  return (((std::uint64_t{first} << 32) | second) & kBits53) < below;
}

}  // namespace

// Writes `count` coins: 1 where the 53 bits drawn for it are `below`, else 0. Moves `state` on.
extern "C" void encore_coins(State* state, std::uint64_t below, std::uint8_t* coins, std::int64_t count) {
  std::uint32_t words[kWords];
  std::uint32_t outputs[kWords];
  for (int i = 0; i < kWords; ++i) words[i] = static_cast<std::uint32_t>(state->words[i]);
  std::int64_t next = static_cast<std::int64_t>(state->next);
  std::int64_t end = next + state->left - 1;  // of this turn
  bool halfway = false;                       // the first output of a pair was the last one of its turn
  std::uint32_t first = 0;
  while (count > 0) {
    if (next == end) {
      turn(words);
      next = 0;
      end = kWords;
    }
    for (std::int64_t i = next; i < end; ++i) outputs[i] = tempered(words[i]);
    if (halfway) {
      *coins++ = comes_up(first, outputs[next++], below);
      --count;
      halfway = false;
    }
    const std::int64_t pairs = (end - next) / 2 < count ? (end - next) / 2 : count;
    const std::uint32_t* pair = outputs + next;
    for (std::int64_t i = 0; i < pairs; ++i) coins[i] = comes_up(pair[2 * i], pair[2 * i + 1], below);
    coins += pairs;
    count -= pairs;
    next += 2 * pairs;
    if (count > 0 && next < end) {
      first = outputs[next++];
      halfway = true;
    }
  }
  for (int i = 0; i < kWords; ++i) state->words[i] = words[i];
  state->next = static_cast<std::uint64_t>(next);
  state->left = static_cast<std::int32_t>(end - next + 1);
}
