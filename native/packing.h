// Packing of sparse vectors into bits (Elias-Fano indices, narrow values) and back.
#pragma once

#include <nanobind/nanobind.h>

// Adds the packing functions to the extension module.
void bind_packing(nanobind::module_ &m);
