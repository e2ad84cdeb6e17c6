// SPDX-License-Identifier: Apache-2.0
// Marks functions that host and device share, and those that run on a device, or on the host in its place;
// FI_UNROLL before a loop asks a device's compiler to unroll it.
#pragma once

#if defined(__CUDACC__)
#define FI_HOST_DEVICE __host__ __device__ __forceinline__
#define FI_DEVICE __device__ __forceinline__
#define FI_UNROLL _Pragma("unroll")
#else
#define FI_UNROLL
#define FI_DEVICE inline
#define FI_HOST_DEVICE inline __attribute__((always_inline))
#endif
