// SPDX-License-Identifier: Apache-2.0
// Tiles that blocks of threads keep in shared memory until their chunk is reduced.
//
// With error feedback an encoder whose packet has a result of the whole chunk would write the sum
// of gradient and residual, and read it again to take away what the packet holds. Here one kernel
// does both: a block takes units, each of a few neighbouring tiles of a chunk, does the sweep of a
// unit, and says that it has arrived. Who arrives last at a chunk ends its reductions. What is left
// of a unit is then found from what the block kept.
//
// All blocks of the kernel run at once (a cooperative launch), and have units number blockIdx.x, +
// blocks, + 2 blocks ..., so the lowest chunk that is not reduced waits for no other: its units are
// at most as many as blocks, so none of them stands behind another in the same block.

#ifndef TF_HIPS_CC_CUDA_HELD_CUH_
#define TF_HIPS_CC_CUDA_HELD_CUH_

#include <cstdlib>

#include "tf_hips/cc/cuda/eights.cuh"

// A test that runs kernels on a CPU defines these itself: there, where blocks run one after
// another, all units are begun before the first is ended.
#ifndef TF_HIPS_HOLD
#define TF_HIPS_HOLD(kernel, hold, stream, call) \
  ::tf_hips::cuda::launch_held(kernel, hold, stream, call)
#define TF_HIPS_HELD_BLOCKS(kernel, tiles) ::tf_hips::cuda::blocks_at_once(kernel, tiles)
#define TF_HIPS_HELD_TILES(unit) ::tf_hips::cuda::held_memory()
#define TF_HIPS_BEGINS_UNITS true
#define TF_HIPS_ENDS_UNITS true
#endif

// So that registers leave room for as many blocks as shared memory does.
#define TF_HIPS_HELD_KERNEL \
  [[maybe_unused]] static __global__ void __launch_bounds__(::tf_hips::cuda::kThreads, 8)

namespace tf_hips {
namespace cuda {

// The most tiles that a block of threads keeps: of more there would be too few blocks, and fewer
// wait too often. Measured.
constexpr int kMostHeld = 4;

// A unit: some tiles of a chunk, the first by its number among those of all chunks, and how many
// units its chunk has.
struct HeldUnit {
  uint32_t chunk, tile, tiles, units;
};

// How the tiles of a call are dealt.
struct Hold {
  uint32_t blocks;      // of threads; 0: there are too few
  uint32_t units;       // of all chunks
  uint32_t each;        // tiles of a unit
  uint32_t tiles;       // of each chunk but the last
  uint32_t last_tiles;  // of that
  uint32_t last_chunk;
  uint32_t per_chunk;  // units of each chunk but the last

  TF_HIPS_INLINE HeldUnit unit(uint32_t number) const {
    const uint32_t chunk = number / per_chunk;
    const uint32_t all = chunk == last_chunk ? last_tiles : tiles;
    const uint32_t first = (number - chunk * per_chunk) * each;
    const uint32_t count = all - first < each ? all - first : each;
    return {chunk, chunk * tiles + first, count, (all + each - 1) / each};
  }
};

// Where the sum of a tile goes: to a tile that is kept, or to memory.
template <bool holds>
TF_HIPS_INLINE auto held_or([[maybe_unused]] float* held, [[maybe_unused]] int64_t base,
                            [[maybe_unused]] float* memory) {
  if constexpr (holds) {
    return SumTile{held, base};
  } else {
    return memory;
  }
}

// What units of a chunk tell each other: how many have arrived, and whether it is reduced.
struct Arrived {
  int32_t count, is_done;
};

// Adds one to a count, and returns what it was. What this block has written is seen by who finds
// it added, and what others have, by this block.
__device__ __forceinline__ int32_t arrive(int32_t* count) {
#ifdef __CUDA_ARCH__
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(count))
               : "memory");
  return before;
#else
  return (*count)++;
#endif
}

__device__ __forceinline__ void say_done(int32_t* is_done) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(__cvta_generic_to_global(is_done))
               : "memory");
#else
  *is_done = 1;
#endif
}

__device__ __forceinline__ void wait_for(const int32_t* is_done) {
#ifdef __CUDA_ARCH__
  int32_t found;
  for (;;) {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                 : "=r"(found)
                 : "l"(__cvta_generic_to_global(is_done))
                 : "memory");
    if (found != 0) return;
    __nanosleep(64);
  }
#else
  if (*is_done == 0) std::abort();
#endif
}

#ifdef __CUDACC__
// Shared memory whose size the launch says.
__device__ __forceinline__ float* held_memory() {
  extern __shared__ float4 held_here[];
  return reinterpret_cast<float*>(held_here);
}
#endif

// All units of a block of threads. `begin` and `end` are given the number of a tile, and where it
// is kept; `reduce` that of a chunk.
template <typename Begin, typename Reduce, typename End>
__device__ __forceinline__ void hold_units(const Hold& hold, Arrived* arrived, const Begin& begin,
                                           const Reduce& reduce, const End& end) {
  TF_HIPS_SHARED int32_t before;
  for (uint32_t number = blockIdx.x; number < hold.units; number += hold.blocks) {
    const HeldUnit unit = hold.unit(number);
    const int32_t last = static_cast<int32_t>(unit.units) - 1;
    float* const at = TF_HIPS_HELD_TILES(number);
    Arrived* const others = arrived + unit.chunk;
    if (TF_HIPS_BEGINS_UNITS) {
      for (uint32_t k = 0; k < unit.tiles; ++k) begin(unit.tile + k, at + k * kTile);
    }
    TF_HIPS_PHASE(t) {
      if (t == 0) {
        if (TF_HIPS_BEGINS_UNITS) before = arrive(&others->count);
        const bool ends_chunk = TF_HIPS_BEGINS_UNITS && before == last;
        if (TF_HIPS_ENDS_UNITS && !ends_chunk) wait_for(&others->is_done);
      }
    }
    if (TF_HIPS_BEGINS_UNITS && before == last) {
      reduce(unit.chunk);
      TF_HIPS_PHASE(t) {
        if (t == 0) say_done(&others->is_done);
      }
    }
    if (TF_HIPS_ENDS_UNITS) {
      for (uint32_t k = 0; k < unit.tiles; ++k) end(unit.tile + k, at + k * kTile);
    }
  }
}

// Deals the tiles of all chunks, `tiles` each but of the last one, `all` in all. `at_once`: how
// many blocks that keep so many tiles run at the same time.
template <typename AtOnce>
Hold deal_tiles(int64_t chunks, int64_t tiles, int64_t all, const AtOnce& at_once) {
  Hold hold{};
  if (all < 2) return hold;
  // As few for each as there can be, so that all multiprocessors have some.
  int64_t each = 0, blocks = 0;
  while (each < kMostHeld && each * blocks < all) blocks = at_once(static_cast<int>(++each));
  const int64_t per_chunk = (tiles + each - 1) / each;
  const int64_t last_tiles = all - (chunks - 1) * tiles;
  const int64_t units = (chunks - 1) * per_chunk + (last_tiles + each - 1) / each;
  if (per_chunk > blocks) return hold;
  // Of several rounds a last one in which most blocks have nothing costs more than is won.
  const int64_t rounds = (units + blocks - 1) / blocks;
  if (rounds > 1 && 4 * rounds * blocks > 5 * units) return hold;
  hold.units = static_cast<uint32_t>(units);
  hold.each = static_cast<uint32_t>(each);
  hold.tiles = static_cast<uint32_t>(tiles);
  hold.last_tiles = static_cast<uint32_t>(last_tiles);
  hold.last_chunk = static_cast<uint32_t>(chunks - 1);
  hold.per_chunk = static_cast<uint32_t>(per_chunk);
  hold.blocks = static_cast<uint32_t>(least(units, blocks));
  return hold;
}

#ifdef __CUDACC__
constexpr unsigned kTileBytes = kTile * sizeof(float);

// How many blocks of threads of a kernel run at once where each keeps so many tiles. There is one
// kernel of a type.
template <typename... Parameters>
int64_t blocks_at_once(void (*kernel)(Parameters...), int tiles) {
  static thread_local int known = -1;
  static thread_local int64_t blocks[kMostHeld + 1] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (known != device) {
    int can = 0, processors = 0;
    cudaDeviceGetAttribute(&can, cudaDevAttrCooperativeLaunch, device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    const void* const entry = reinterpret_cast<const void*>(kernel);
    cudaFuncSetAttribute(entry, cudaFuncAttributePreferredSharedMemoryCarveout,
                         cudaSharedmemCarveoutMaxShared);
    for (int k = 1; k <= kMostHeld; ++k) {
      int found = 0;
      cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(k * kTileBytes));
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, entry, kThreads, k * kTileBytes);
      blocks[k] = can != 0 ? int64_t{found} * processors : 0;
    }
    // That a block cannot keep so much is no error.
    static_cast<void>(cudaGetLastError());
    known = device;
  }
  return blocks[tiles];
}

// Launches a kernel whose blocks wait for each other. False: it cannot be.
template <typename Call>
bool launch_held(void (*kernel)(Call, Hold), const Hold& hold, cudaStream_t stream,
                 const Call& call) {
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(hold.blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = hold.each * kTileBytes;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  if (cudaLaunchKernelEx(&config, kernel, call, hold) == cudaSuccess) return true;
  // The kernels that are launched in its place meet what is wrong with the GPU.
  static_cast<void>(cudaGetLastError());
  return false;
}
#endif

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_HELD_CUH_
