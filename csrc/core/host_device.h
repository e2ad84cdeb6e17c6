// SPDX-License-Identifier: Apache-2.0
// Marks functions that host and device share, and those that run on a device, or on the host in its place;
// _CALL: not inlined on a device. FI_UNROLL or FI_UNROLL_BY(times) before a loop asks a device's compiler to
// unroll it, FI_ROLL not to: code that runs once costs the time of fetching it.
#pragma once

#if defined(__CUDACC__)
#define FI_HOST_DEVICE __host__ __device__ __forceinline__
#define FI_HOST_DEVICE_CALL inline __host__ __device__ __noinline__
#define FI_DEVICE __device__ __forceinline__
#define FI_DEVICE_CALL __device__ __noinline__
#define FI_UNROLL _Pragma("unroll")
#define FI_PRAGMA(text) _Pragma(#text)
#define FI_UNROLL_BY(times) FI_PRAGMA(unroll times)
#define FI_ROLL _Pragma("unroll 1")
#else
#define FI_UNROLL
#define FI_UNROLL_BY(times)
#define FI_ROLL
#define FI_DEVICE inline
#define FI_DEVICE_CALL inline
#define FI_HOST_DEVICE_CALL inline
#define FI_HOST_DEVICE inline __attribute__((always_inline))
#endif
