// SPDX-License-Identifier: Apache-2.0
// A device of type GPU for TensorFlow, whose memory is that of the process: a tool of tests, so
// that what TensorFlow does with kernels for GPUs (placement, copies, streams, events) is seen
// where no GPU is. A plugin of TensorFlow's C interface for devices; all work is done at once, and
// counted.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

struct SP_Stream_st {};
struct SP_Event_st {};
struct SP_Timer_st {};

namespace {

std::atomic<int64_t> bytes_to_host{0};
std::atomic<int64_t> bytes_to_device{0};

void allocate(const SP_Device*, uint64_t size, int64_t, SP_DeviceMemoryBase* memory) {
  memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
  memory->opaque = std::aligned_alloc(256, (size + 255) / 256 * 256);
  memory->size = size;
}
void deallocate(const SP_Device*, SP_DeviceMemoryBase* memory) {
  std::free(memory->opaque);
  memory->opaque = nullptr;
  memory->size = 0;
}
void* host_allocate(const SP_Device*, uint64_t size) {
  return std::aligned_alloc(64, (size + 63) / 64 * 64);
}
void host_deallocate(const SP_Device*, void* memory) { std::free(memory); }
TF_Bool allocator_stats(const SP_Device*, SP_AllocatorStats*) { return 0; }
TF_Bool memory_usage(const SP_Device*, int64_t* free, int64_t* total) {
  *free = *total = int64_t{1} << 30;
  return 1;
}

void create_stream(const SP_Device*, SP_Stream* stream, TF_Status*) { *stream = new SP_Stream_st; }
void destroy_stream(const SP_Device*, SP_Stream stream) { delete stream; }
void depend(const SP_Device*, SP_Stream, SP_Stream, TF_Status*) {}
void stream_status(const SP_Device*, SP_Stream, TF_Status*) {}

void create_event(const SP_Device*, SP_Event* event, TF_Status*) { *event = new SP_Event_st; }
void destroy_event(const SP_Device*, SP_Event event) { delete event; }
SE_EventStatus event_status(const SP_Device*, SP_Event) { return SE_EVENT_COMPLETE; }
void record_event(const SP_Device*, SP_Stream, SP_Event, TF_Status*) {}
void wait_for_event(const SP_Device*, SP_Stream, SP_Event, TF_Status*) {}
void block_for_event(const SP_Device*, SP_Event, TF_Status*) {}

void create_timer(const SP_Device*, SP_Timer* timer, TF_Status*) { *timer = new SP_Timer_st; }
void destroy_timer(const SP_Device*, SP_Timer timer) { delete timer; }
void use_timer(const SP_Device*, SP_Stream, SP_Timer, TF_Status*) {}
uint64_t nanoseconds(SP_Timer) { return 0; }

void to_host(const SP_Device*, void* to, const SP_DeviceMemoryBase* from, uint64_t size,
             TF_Status*) {
  bytes_to_host += static_cast<int64_t>(size);
  std::memcpy(to, from->opaque, size);
}
void to_device(const SP_Device*, SP_DeviceMemoryBase* to, const void* from, uint64_t size,
               TF_Status*) {
  bytes_to_device += static_cast<int64_t>(size);
  std::memcpy(to->opaque, from, size);
}
void to_same(const SP_Device*, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
             uint64_t size, TF_Status*) {
  std::memcpy(to->opaque, from->opaque, size);
}
void to_host_in(const SP_Device* device, SP_Stream, void* to, const SP_DeviceMemoryBase* from,
                uint64_t size, TF_Status* status) {
  to_host(device, to, from, size, status);
}
void to_device_in(const SP_Device* device, SP_Stream, SP_DeviceMemoryBase* to, const void* from,
                  uint64_t size, TF_Status* status) {
  to_device(device, to, from, size, status);
}
void to_same_in(const SP_Device* device, SP_Stream, SP_DeviceMemoryBase* to,
                const SP_DeviceMemoryBase* from, uint64_t size, TF_Status* status) {
  to_same(device, to, from, size, status);
}

void block_for_stream(const SP_Device*, SP_Stream, TF_Status*) {}
void synchronize(const SP_Device*, TF_Status*) {}
void zero(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* memory, uint64_t size, TF_Status*) {
  std::memset(memory->opaque, 0, size);
}
void fill(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* memory, uint8_t value, uint64_t size,
          TF_Status*) {
  std::memset(memory->opaque, value, size);
}
void fill32(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* memory, uint32_t value, uint64_t size,
            TF_Status*) {
  for (uint64_t k = 0; k < size / 4; ++k) static_cast<uint32_t*>(memory->opaque)[k] = value;
}
// Nobody asks for one.
TF_Bool host_callback(const SP_Device*, SP_Stream, SE_StatusCallbackFn, void*) { return 0; }

void count_devices(const SP_Platform*, int* count, TF_Status*) { *count = 1; }
void create_device(const SP_Platform*, SE_CreateDeviceParams* params, TF_Status*) {
  params->device->struct_size = SP_DEVICE_STRUCT_SIZE;
  params->device->ordinal = params->ordinal;
  params->device->hardware_name = "none";
  params->device->device_vendor = "none";
  params->device->pci_bus_id = "0000:00:00.0";
}
void destroy_device(const SP_Platform*, SP_Device*) {}
int32_t numa_node(const SP_Device*) { return -1; }
int64_t bandwidth(const SP_Device*) { return -1; }
double gflops(const SP_Device*) { return -1; }
void create_device_fns(const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status*) {
  *params->device_fns = {SP_DEVICE_FNS_STRUCT_SIZE, nullptr, numa_node, bandwidth, gflops};
}
void destroy_device_fns(const SP_Platform*, SP_DeviceFns*) {}
void create_executor(const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status*) {
  SP_StreamExecutor* const with = params->stream_executor;
  with->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
  with->allocate = allocate;
  with->deallocate = deallocate;
  with->host_memory_allocate = host_allocate;
  with->host_memory_deallocate = host_deallocate;
  with->get_allocator_stats = allocator_stats;
  with->device_memory_usage = memory_usage;
  with->create_stream = create_stream;
  with->destroy_stream = destroy_stream;
  with->create_stream_dependency = depend;
  with->get_stream_status = stream_status;
  with->create_event = create_event;
  with->destroy_event = destroy_event;
  with->get_event_status = event_status;
  with->record_event = record_event;
  with->wait_for_event = wait_for_event;
  with->create_timer = create_timer;
  with->destroy_timer = destroy_timer;
  with->start_timer = use_timer;
  with->stop_timer = use_timer;
  with->memcpy_dtoh = to_host_in;
  with->memcpy_htod = to_device_in;
  with->memcpy_dtod = to_same_in;
  with->sync_memcpy_dtoh = to_host;
  with->sync_memcpy_htod = to_device;
  with->sync_memcpy_dtod = to_same;
  with->block_host_for_event = block_for_event;
  with->block_host_until_done = block_for_stream;
  with->synchronize_all_activity = synchronize;
  with->mem_zero = zero;
  with->memset = fill;
  with->memset32 = fill32;
  with->host_callback = host_callback;
}
void destroy_executor(const SP_Platform*, SP_StreamExecutor*) {}
void create_timer_fns(const SP_Platform*, SP_TimerFns* with, TF_Status*) {
  with->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
  with->nanoseconds = nanoseconds;
}
void destroy_timer_fns(const SP_Platform*, SP_TimerFns*) {}
void destroy_platform(SP_Platform*) {}
void destroy_platform_fns(SP_PlatformFns*) {}

}  // namespace

EXPORT void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status*) {
  params->major_version = SE_MAJOR;
  params->minor_version = SE_MINOR;
  params->patch_version = SE_PATCH;
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "DOUBLE";
  params->platform->type = "GPU";
  params->platform->supports_unified_memory = 0;
  params->platform->use_bfc_allocator = 0;
  SP_PlatformFns* const with = params->platform_fns;
  with->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  with->get_device_count = count_devices;
  with->create_device = create_device;
  with->destroy_device = destroy_device;
  with->create_device_fns = create_device_fns;
  with->destroy_device_fns = destroy_device_fns;
  with->create_stream_executor = create_executor;
  with->destroy_stream_executor = destroy_executor;
  with->create_timer_fns = create_timer_fns;
  with->destroy_timer_fns = destroy_timer_fns;
  params->destroy_platform = destroy_platform;
  params->destroy_platform_fns = destroy_platform_fns;
}

// Copies so far, in bytes.
EXPORT int64_t gpu_double_bytes_to_host() { return bytes_to_host; }
EXPORT int64_t gpu_double_bytes_to_device() { return bytes_to_device; }
