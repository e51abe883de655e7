/* Blocks of the quantized formats taken apart into exact parts: what both packers read.
 *
 * Formats are numbered by their GGUF type; those that GGUF does not have by compiler/formats (Format.number).
 */
#ifndef TP_BLOCKS_H
#define TP_BLOCKS_H

#include <stdint.h>
#include <string.h>

enum { SUPER = 256, GROUPS = 16 };
enum { F32 = 0, F16 = 1, BF16 = 30, FP8 = 205, FP8_BLOCK128 = 206, FP8_ROW = 212 };
enum { E4M3_BLOCK = 32, E4M3_BLOCK_BYTES = 4 + E4M3_BLOCK }; /* scale float32, then e4m3 numbers */
enum { MXFP4 = 39, MXFP4_BYTES = 17, NVFP4 = 211, NVFP4_BYTES = 22 };
enum { E2M1_TABLE = 1, IQ4_TABLE = 2 }; /* what codes stand for (fp4.c) */

typedef struct {
    uint16_t d, dmin;        /* float16 bits; d is bfloat16 where the format says so */
    int8_t sub[GROUPS];      /* scale of each group, times d */
    uint8_t submin[GROUPS];  /* minimum of each group, times dmin */
    uint32_t wide;           /* float32 bits of d, where the format says so */
    uint8_t zero;            /* zero of the block, where blocks have one */
    uint8_t codes[SUPER];
} parts;

typedef struct {
    int block_bytes, super, group, bits, has_min, has_sub;
    int d_at, dmin_at; /* byte offsets of the scales */
    void (*take)(const uint8_t *block, parts *to);
    int lines_at;            /* where the codes lie as the lines of a plane (compiler/layouts.py), or 0 */
    int has_zero, zero_at;
    int bf16;                /* d is bfloat16 */
    int table;               /* codes stand for the numbers of a table */
    int wide, e4m3_sub;      /* d is float32 (parts.wide); sub holds e4m3 numbers */
} format;

/* fp8.c */
uint8_t tp_to_e4m3(float value);
float tp_of_e4m3(uint8_t code);

/* The format of a number, or NULL for plain floats and e4m3 numbers. */
const format *tp_format(int id);

static inline void tp_take(const format *f, const uint8_t *block, parts *to) {
    memcpy(&to->d, block + f->d_at, 2);
    to->dmin = 0;
    if (f->has_min) memcpy(&to->dmin, block + f->dmin_at, 2);
    f->take(block, to);
}

static inline int is_float(int id) { return id == F32 || id == F16 || id == BF16; }
static inline int is_e4m3(int id) { return id == FP8 || id == FP8_BLOCK128 || id == FP8_ROW; }
static inline int float_bytes(int id) { return id == F32 ? 4 : 2; }

#endif
