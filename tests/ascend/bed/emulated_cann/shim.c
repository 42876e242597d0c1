// The part of AscendCL's C interface that torch-npu needs to make devices, memory, streams, events and operator arguments, on host memory.
// What reads or writes device data asynchronously is not here: those entry points jump to Python (see build.py).
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_PARAM = 100000, NO_CONTEXT = 107002, OUT_OF_MEMORY = 207001, UNKNOWN_CALL = 500001 };
enum { STREAMS = 4096, DEVICES = 16, ALIGNMENT = 512 };

static const char *setting(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value ? value : otherwise;
}

// ---- what the machine is ----
const char *aclrtGetSocName(void) { return setting("EMULATED_SOC", "Ascend910B1"); }
int aclsysGetCANNVersion(int package, char *out) { memset(out, 0, 128); strcpy(out, setting("EMULATED_CANN", "9.1.0")); return OK; }
int aclsysGetVersionStr(char *package, char *out) { strcpy(out, setting("EMULATED_CANN", "9.1.0")); return OK; }
int aclrtGetDeviceCount(uint32_t *out) { *out = atoi(setting("EMULATED_DEVICES", "2")); return OK; }
int aclInit(const char *config) { return OK; }
int aclFinalize(void) { return OK; }

// ---- the current device of a thread; a context is the address of its device's byte ----
static __thread int32_t current = -1;
static char contexts[DEVICES], streams[STREAMS];
int aclrtGetDevice(int32_t *out) { if (current < 0) return NO_CONTEXT; *out = current; return OK; }
int aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= atoi(setting("EMULATED_DEVICES", "2"))) return INVALID_PARAM;
  current = device;
  return OK;
}
int aclrtResetDevice(int32_t device) { current = -1; return OK; }
int aclrtGetCurrentContext(void **out) { if (current < 0) return NO_CONTEXT; *out = &contexts[current]; return OK; }
int aclrtSetCurrentContext(void *context) { current = (char *)context - contexts; return OK; }
int aclrtDeviceCanAccessPeer(int32_t *out, int32_t device, int32_t peer) { *out = 1; return OK; }

// ---- memory ----
static size_t used;
static size_t capacity(void) { return (size_t)strtoull(setting("EMULATED_MEMORY", "8589934592"), NULL, 10); }
int aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { return OK; }
int aclrtDeviceDisablePeerAccess(int32_t peer) { return OK; }
int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) {
  *total = capacity();
  *free_bytes = used < *total ? *total - used : 0;
  return OK;
}
// Fresh device memory is filled with 0xCD, so that a kernel that reads what nobody wrote gives a visible number.
int aclrtMalloc(void **out, size_t bytes, int policy) {
  size_t size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + ALIGNMENT;
  if (used + size > capacity() || posix_memalign(out, ALIGNMENT, size)) return OUT_OF_MEMORY;
  memset(*out, 0xCD, size);
  used += malloc_usable_size(*out);
  return OK;
}
void emulated_release(void *p) { used -= malloc_usable_size(p); free(p); }
int aclrtMallocAlign32(void **out, size_t bytes, int policy) { return aclrtMalloc(out, bytes, policy); }
int aclrtMallocHost(void **out, size_t bytes) { return posix_memalign(out, 64, bytes + 64) ? OUT_OF_MEMORY : OK; }
int aclrtFreeHost(void *p) { free(p); return OK; }

// ---- streams (what runs on them, and events: runtime.py) ----
int aclrtCreateStream(void **out) { static int n; *out = &streams[n++ % STREAMS]; return OK; }
int aclrtCreateStreamWithConfig(void **out, uint32_t priority, uint32_t flags) { return aclrtCreateStream(out); }
int aclrtDestroyStream(void *stream) { return OK; }
int aclrtDestroyStreamForce(void *stream) { return OK; }
int aclrtSetStreamAttribute(void *stream, int attribute, void *value) { return OK; }
int aclrtSetStreamOverflowSwitch(void *stream, uint32_t flag) { return OK; }

// ---- options ----
int aclrtSetDeviceSatMode(int mode) { return OK; }
int aclrtGetDeviceSatMode(int *out) { *out = 1; return OK; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return OK; }
int aclSetCompileopt(int option, const char *value) { return OK; }
size_t aclGetCompileoptSize(int option) { return 16; }
int aclGetCompileopt(int option, char *out, size_t bytes) { strncpy(out, "disable", bytes); return OK; }
static int64_t options[64];
int aclrtGetSysParamOpt(int option, int64_t *out) { *out = options[option & 63]; return OK; }
int aclrtSetSysParamOpt(int option, int64_t value) { options[option & 63] = value; return OK; }
int aclrtCtxGetSysParamOpt(int option, int64_t *out) { return aclrtGetSysParamOpt(option, out); }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

// ---- operator arguments: opaque to callers, so their layout is ours (objects.py reads it) ----
enum { TENSOR = 1, SCALAR, INTS, FLOATS, BOOLS, TENSORS, SCALARS };
typedef struct {
  int32_t kind, dtype, format, rank, storage_rank;
  int64_t shape[8], strides[8], storage_shape[8], offset;
  void *data;
} Tensor;
typedef struct { int32_t kind, dtype; double real; int64_t integer; } Scalar;
typedef struct { int32_t kind; uint64_t count; void *items; } Array;

Tensor *aclCreateTensor(const int64_t *shape, uint64_t rank, int dtype, const int64_t *strides, int64_t offset, int format,
                        const int64_t *storage_shape, uint64_t storage_rank, void *data) {
  if (rank > 8 || storage_rank > 8) return NULL;
  Tensor *t = calloc(1, sizeof *t);
  *t = (Tensor){TENSOR, dtype, format, rank, storage_rank, .offset = offset, .data = data};
  memcpy(t->shape, shape, rank * sizeof *shape);
  if (strides) memcpy(t->strides, strides, rank * sizeof *strides);
  memcpy(t->storage_shape, storage_shape, storage_rank * sizeof *storage_shape);
  return t;
}
Scalar *aclCreateScalar(void *value, int dtype) {
  enum { F32 = 0, I32 = 3, I64 = 9, F64 = 11, BOOL = 12 };
  Scalar *s = calloc(1, sizeof *s);
  *s = (Scalar){SCALAR, dtype};
  switch (dtype) {
    case F32: s->real = *(float *)value; s->integer = s->real; break;
    case F64: s->real = *(double *)value; s->integer = s->real; break;
    case I32: s->integer = *(int32_t *)value; s->real = s->integer; break;
    case I64: s->integer = *(int64_t *)value; s->real = s->integer; break;
    case BOOL: s->integer = *(uint8_t *)value; s->real = s->integer; break;
    default: free(s); return NULL;
  }
  return s;
}
static Array *array(int kind, const void *items, uint64_t count, size_t item_bytes) {
  Array *a = calloc(1, sizeof *a);
  *a = (Array){kind, count, malloc(count * item_bytes + 8)};
  memcpy(a->items, items, count * item_bytes);
  return a;
}
Array *aclCreateIntArray(const int64_t *items, uint64_t n) { return array(INTS, items, n, 8); }
Array *aclCreateFloatArray(const float *items, uint64_t n) { return array(FLOATS, items, n, 4); }
Array *aclCreateBoolArray(const uint8_t *items, uint64_t n) { return array(BOOLS, items, n, 1); }
Array *aclCreateTensorList(const void *items, uint64_t n) { return array(TENSORS, items, n, 8); }
Array *aclCreateScalarList(const void *items, uint64_t n) { return array(SCALARS, items, n, 8); }
static int destroy(Array *a) { if (a) free(a->items); free(a); return OK; }
int aclDestroyTensor(void *t) { free(t); return OK; }
int aclDestroyScalar(void *s) { free(s); return OK; }
int aclDestroyIntArray(Array *a) { return destroy(a); }
int aclDestroyFloatArray(Array *a) { return destroy(a); }
int aclDestroyBoolArray(Array *a) { return destroy(a); }
int aclDestroyScalarList(Array *a) { return destroy(a); }
int aclDestroyTensorList(Array *a) {
  for (uint64_t i = 0; a && i < a->count; i++) free(((void **)a->items)[i]);
  return destroy(a);
}
int aclDestroyAclOpExecutor(void *executor) { return OK; }
int aclSetAclOpExecutorRepeatable(void *executor) { return OK; }

// ---- faults ----
char emulated_fault[4096] = "emulated CANN: no fault";
const char *aclGetRecentErrMsg(void) { return emulated_fault; }
int emulated_missing(const char *name) {
  snprintf(emulated_fault, sizeof emulated_fault, "emulated CANN has no %s", name);
  fprintf(stderr, "emulated CANN has no %s\n", name);
  return UNKNOWN_CALL;
}
