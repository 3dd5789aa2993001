"""Compute zlib's crc32 on a GPU, so that files can be checked on any device.

A CRC is linear: the CRCs of parts are computed in parallel, each is multiplied by x to the power of the
number of bits behind the part, modulo the polynomial, and all are xored. This is zlib's ``crc32_combine``.
"""

from __future__ import annotations

#: The polynomial of zlib's crc32, with bits in reversed order.
POLYNOMIAL = 0xEDB88320
#: Bytes that each thread processes, and threads of a block.
PART, THREADS = 4096, 128


def times(a: int, b: int) -> int:
    """Multiply two polynomials modulo that of the CRC, as zlib's ``multmodp`` does."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


def _powers() -> list[int]:
    powers = [1 << 30]
    while len(powers) < 32:
        powers.append(times(powers[-1], powers[-1]))
    return powers


#: Element n is x^(2^n); the sequence is periodic after that.
POWERS = _powers()

#: Xors the CRC of ``nbytes`` bytes into ``*found``, which has to be 0 initially.
KERNEL = f"""
__device__ unsigned int times(unsigned int a, unsigned int b) {{
    unsigned int product = 0;
    for (unsigned int bit = 1u << 31; bit; bit >>= 1) {{
        if (a & bit) product ^= b;
        b = (b >> 1) ^ (b & 1 ? {POLYNOMIAL}u : 0);
    }}
    return product;
}}

extern "C" __global__ void crc32(const unsigned char* data, unsigned long long nbytes, unsigned int* found) {{
    const unsigned int powers[32] = {{{", ".join(f"{power}u" for power in POWERS)}}};
    __shared__ unsigned int table[256];
    for (unsigned int byte = threadIdx.x; byte < 256; byte += blockDim.x) {{
        unsigned int rest = byte;
        for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ (rest & 1 ? {POLYNOMIAL}u : 0);
        table[byte] = rest;
    }}
    __syncthreads();
    unsigned long long at = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) * {PART};
    if (at >= nbytes) return;
    unsigned long long end = at + {PART} < nbytes ? at + {PART} : nbytes;
    unsigned int crc = ~0u;
    for (; at < end; ++at) crc = table[(crc ^ data[at]) & 255] ^ (crc >> 8);
    crc = ~crc;
    unsigned long long behind = nbytes - end;
    for (int power = 3; behind; behind >>= 1, ++power)  // 2 to the power of 3 bits are a byte
        if (behind & 1) crc = times(powers[power & 31], crc);
    atomicXor(found, crc);
}}
"""
