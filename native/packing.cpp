// Elias-Fano indices and bf16, int8 or float32 values; kernels/packing.py is the specification, and
// docs/wire-format.md shows the bytes.
#include "packing.h"

#include "packed.h"

namespace nb = nanobind;
using Address = uintptr_t;

namespace {

bool pack(Address indices, Address values, uint64_t nnz, uint64_t size, int form, uint64_t block,
          Address body, uint64_t nbytes, Address decoded) {
  return sparsync::packed::pack(reinterpret_cast<const int64_t *>(indices),
                                reinterpret_cast<const float *>(values), nnz, size, form, block,
                                reinterpret_cast<uint8_t *>(body), nbytes,
                                reinterpret_cast<float *>(decoded));
}

int64_t unpack(Address body, uint64_t nbytes, uint64_t nnz, uint64_t size, int form,
               uint64_t block, Address indices, Address values) {
  return sparsync::packed::unpack(reinterpret_cast<const uint8_t *>(body), nbytes, nnz, size, form,
                                  block, reinterpret_cast<int64_t *>(indices),
                                  reinterpret_cast<float *>(values));
}

}  // namespace

void bind_packing(nb::module_ &m) {
  using released = nb::call_guard<nb::gil_scoped_release>;
  m.def("pack", &pack, released());
  m.def("unpack", &unpack, released());
}
