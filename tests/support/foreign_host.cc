// SPDX-License-Identifier: Apache-2.0
// Calls functions of shared libraries for who cannot load them: tests/support/foreign.py, which
// says what it wants on standard input and reads results from standard output.
//
// A request is a letter and what belongs to it; numbers are little-endian words of 64 bits.
//
//     o  length, path                 opens a library: its handle, or 0 and length, text
//     s  handle, length, name         the address of a symbol, or 0
//     r  address, size                memory; size 0: up to the first byte of 0
//     c  a call: see Call()
//
// Its thread flushes denormals, as TensorFlow's do: what needs them must say so itself.

#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

void ReadAll(void* to, size_t size) {
  char* at = static_cast<char*>(to);
  while (size > 0) {
    const ssize_t got = read(STDIN_FILENO, at, size);
    if (got <= 0) std::exit(got == 0 ? 0 : 2);
    at += got;
    size -= static_cast<size_t>(got);
  }
}

void WriteAll(const void* from, size_t size) {
  const char* at = static_cast<const char*>(from);
  while (size > 0) {
    const ssize_t put = write(STDOUT_FILENO, at, size);
    if (put <= 0) std::exit(2);
    at += put;
    size -= static_cast<size_t>(put);
  }
}

uint64_t Word() {
  uint64_t word;
  ReadAll(&word, sizeof word);
  return word;
}

void Say(uint64_t word) { WriteAll(&word, sizeof word); }

std::string Text() {
  std::string text(Word(), '\0');
  ReadAll(text.data(), text.size());
  return text;
}

void FlushDenormals() {
#if defined(__SSE2__)
  _mm_setcsr(_mm_getcsr() | 0x8040u);
#elif defined(__aarch64__)
  uint64_t word;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  asm volatile("msr fpcr, %0" : : "r"(word | uint64_t{1} << 24));
#endif
}

// Whether it still does: a library must leave its caller's mode as it was.
bool Flushes() {
  volatile float tiny = 0x1p-126f;
  return tiny * 0.5f == 0.0f;
}

// Memory of a call: as far from a page's begin as the caller's own is, between bytes that nobody
// may change.
constexpr uint64_t kPage = 4096;
constexpr size_t kGuard = 256;
constexpr uint8_t kMark = 0xA5;

struct Memory {
  std::vector<uint8_t> room;
  uint8_t* begin = nullptr;
  uint64_t size = 0;
  bool is_sent_back = false;

  void Take() {
    size = Word();
    const uint64_t place = Word() % kPage;
    is_sent_back = Word() != 0;
    room.assign(size + 2 * kGuard + 2 * kPage, kMark);
    const uint64_t first = reinterpret_cast<uint64_t>(room.data()) + kGuard;
    begin = room.data() + kGuard + (place + kPage - first % kPage) % kPage;
    ReadAll(begin, size);
  }

  bool IsGuarded() const {
    for (const uint8_t* at = room.data(); at < begin; ++at) {
      if (*at != kMark) return false;
    }
    for (const uint8_t* at = begin + size; at < room.data() + room.size(); ++at) {
      if (*at != kMark) return false;
    }
    return true;
  }
};

// All arguments that a function of ours may have: those of integers and addresses in the order in
// which they come, and those of floats, a class of registers each. A float is the low half of its
// register, and each argument on the stack has 8 bytes, on x86-64 as on AArch64.
using Function = uint64_t (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                              uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, double, double,
                              double, double, double, double);
constexpr size_t kMaxWhole = 12, kMaxReal = 6;

// Takes the address of a function; the number of memories, then size, address in the caller,
// whether it is sent back, and content of each; the number of addresses in them, then memory and
// offset where one is, and which memory it is of; the number of integers, then 0 and a value or 1
// and a memory; the number of floats, and the bits of each as a double or the low half of one.
// Answers with 0, or 1 where bytes around a memory were written, or 2 where the mode of denormals
// was; the result; and memories.
void Call() {
  const uint64_t address = Word();
  std::vector<Memory> memories(Word());
  for (Memory& memory : memories) memory.Take();
  for (uint64_t left = Word(); left > 0; --left) {
    const Memory& where = memories.at(Word());
    uint8_t* const at = where.begin + Word();
    const uint8_t* const of = memories.at(Word()).begin;
    std::memcpy(at, &of, sizeof of);
  }
  uint64_t whole[kMaxWhole] = {};
  double real[kMaxReal] = {};
  const uint64_t num_whole = Word();
  if (num_whole > kMaxWhole) std::exit(3);
  for (uint64_t k = 0; k < num_whole; ++k) {
    const bool is_memory = Word() != 0;
    const uint64_t word = Word();
    whole[k] = is_memory ? reinterpret_cast<uint64_t>(memories.at(word).begin) : word;
  }
  const uint64_t num_real = Word();
  if (num_real > kMaxReal) std::exit(3);
  for (uint64_t k = 0; k < num_real; ++k) ReadAll(&real[k], sizeof real[k]);
  Function function;
  std::memcpy(&function, &address, sizeof function);
  const uint64_t result = function(whole[0], whole[1], whole[2], whole[3], whole[4], whole[5],
                                   whole[6], whole[7], whole[8], whole[9], whole[10], whole[11],
                                   real[0], real[1], real[2], real[3], real[4], real[5]);
  uint64_t wrong = Flushes() ? 0 : 2;
  for (const Memory& memory : memories) {
    if (!memory.IsGuarded()) wrong = 1;
  }
  Say(wrong);
  Say(result);
  for (const Memory& memory : memories) {
    if (memory.is_sent_back) WriteAll(memory.begin, memory.size);
  }
}

void Open() {
  const std::string path = Text();
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  Say(reinterpret_cast<uint64_t>(handle));
  if (handle != nullptr) return;
  const std::string why = dlerror();
  Say(why.size());
  WriteAll(why.data(), why.size());
}

void Find() {
  void* const handle = reinterpret_cast<void*>(Word());
  Say(reinterpret_cast<uint64_t>(dlsym(handle, Text().c_str())));
}

void Show() {
  const char* const from = reinterpret_cast<const char*>(Word());
  const uint64_t size = Word();
  if (size > 0) return WriteAll(from, size);
  const uint64_t length = std::strlen(from);
  Say(length);
  WriteAll(from, length);
}

}  // namespace

int main() {
  FlushDenormals();
  for (;;) {
    char what;
    ReadAll(&what, 1);
    switch (what) {
      case 'o':
        Open();
        break;
      case 's':
        Find();
        break;
      case 'r':
        Show();
        break;
      case 'c':
        Call();
        break;
      default:
        return 3;
    }
  }
}
