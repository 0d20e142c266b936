// chunks: attention of each row over its key list, one partial per 512 keys.
//
//   s_k = (q . k) * head_dim ** -0.5
//   per tile of 64 keys, in list order:  m' = max(m, max s_k),  p_k = exp(s_k - m'),  a = exp(m - m')
//       o = a * o + sum_k bf16(p_k) * v_k          the sum a chain of FMAs in list order
//       l = a * l + tree_j(tree(p_8j .. p_8j+7))
//   partial = (o, m, l), fp32; a chunk without keys gives the identity (0, -inf, 0)
//
// Floors of a row of n keys at Flash Next geometry: 2 KiB * n of keys and values, read once; 24 Ki * n FLOP in fp32, 12 to
// a byte, where an H200 has 14 and a GB10 110: bound by memory. One block of threads per (chunk, key/value head, row), so
// that a row of 2,048 keys fills 8; its query heads share each tile. A key's address is looked up once per tile (key_at)
// and serves its key and its value, whose rows lie alike. The keys of a tile go through shared memory, 16 bytes at a
// time; values are read where they are summed, a row by neighbouring threads. A tile is done with its keys once they are
// scored: there fn_attn_chunks_ahead fetches the next tile's, while this one is summed. The same sums.
#include "fetch.cuh"
#include "pages.cuh"
#include "tile.cuh"

struct ChunkArguments {
  const bf16* keys;
  const bf16* values;
  Pages pages;
  const bf16* q;
  const int* ids;  // [rows, capacity]; rows that are not sparse read positions 0, 1, ..
  int capacity;
  const int* nk;
  const int* sparse;
  float* o;
  float* m;
  float* l;
  int chunks;
};

constexpr int width = KVP_HEAD_DIM, pieces = width / 8, tile_pieces = KVP_TILE / 8, row_of_scores = KVP_TILE + 4;
// Registers of a thread: score_keys * score_heads and value_run * value_heads sums of eight lanes.
constexpr int score_keys = 2, score_rows = KVP_TILE / score_keys;
constexpr int score_heads = heads_per_thread(KVP_GROUP, score_rows, 12 / score_keys);
constexpr int value_run = run_of(pieces, KVP_HOST_OR(2, 1)), value_columns = pieces / value_run;
constexpr int value_heads = heads_per_thread(KVP_GROUP, value_columns, 12 / value_run);
constexpr int value_items = ceil_div(value_columns * (KVP_GROUP / value_heads), KVP_THREADS);

// Where this thread's item n of a tile's values lies: `value_run` pieces from element d on, `value_heads` heads from h0 on.
struct ValueItem {
  int d, h0;
  __device__ __forceinline__ explicit ValueItem(int n) {
    const int i = threadIdx.x + n * KVP_THREADS;
    d = i % value_columns * value_run * 8;
    h0 = i / value_columns * value_heads;
  }
};

using Values = Lanes[value_items][value_heads][value_run];

// What a block's threads share, beside the tile of keys.
struct Shared {
  long long key_at[2][KVP_TILE];
  float highest[2][KVP_GROUP], rescale[KVP_GROUP], normaliser[KVP_GROUP];
  float sums[KVP_GROUP][tile_pieces];
  __align__(16) float score[KVP_GROUP][row_of_scores];
  __align__(16) float weight[KVP_GROUP][row_of_scores];
  __align__(16) Query queries[KVP_GROUP * width];
};

// Scores of the first `here` keys of a tile, -inf behind them.
__device__ __forceinline__ void score_tile(Shared& s, const bf16* tile_keys, int here) {
  for (int i = threadIdx.x; i < score_rows * (KVP_GROUP / score_heads); i += KVP_THREADS) {
    const int k0 = i % score_rows, h0 = i / score_rows * score_heads;
    float dot[score_heads][score_keys];
    const bf16* rows = tile_keys + k0 * staged_stride(width);
    if (k0 < here)
      dots<score_heads, score_keys, width>(s.queries + h0 * width, rows, score_rows * staged_stride(width), dot);
    KVP_UNROLL for (int h = 0; h < score_heads; ++h)
      KVP_UNROLL for (int r = 0; r < score_keys; ++r) {  // what a row past the list holds is dropped here
        const int k = k0 + r * score_rows;
        s.score[h0 + h][k] = k < here ? dot[h][r] * KVP_SCALE : -KVP_INFINITY;
      }
  }
}

// Weights of a tile, their sums by eights, and what the tiles before are rescaled by.
__device__ __forceinline__ void weigh_tile(Shared& s, int tile) {
  const int now = tile & 1, next = now ^ 1;
  for (int i = threadIdx.x; i < KVP_GROUP * tile_pieces; i += KVP_THREADS) {
    const int h = i / tile_pieces, piece = i % tile_pieces;
    Lanes top = load8(s.score[h]);
    KVP_UNROLL for (int j = 1; j < tile_pieces; ++j) top = max8(top, load8(s.score[h] + 8 * j));
    const float tile_high = highest8(top), before = s.highest[now][h];
    const float high = tile_high > before ? tile_high : before;
    Lanes p = exp8(load8(s.score[h] + 8 * piece) - splat(high));
    store8(s.weight[h] + 8 * piece, round8(p));
    s.sums[h][piece] = sum8(p);
    if (piece == 0) {
      s.highest[next][h] = high;
      s.rescale[h] = exp_nonpositive(before - high);
    }
  }
}

// Joins the tile to what was summed before it.
__device__ __forceinline__ void sum_tile(Shared& s, const bf16* values, const long long* key_at, int here, Values& o) {
  for (int h = threadIdx.x; h < KVP_GROUP; h += KVP_THREADS)
    s.normaliser[h] = fmaf(s.rescale[h], s.normaliser[h], sum8(load8(s.sums[h])));
  KVP_UNROLL for (int n = 0; n < value_items; ++n) {
    const ValueItem at(n);
    if (at.h0 >= KVP_GROUP) continue;
    Lanes sum[value_heads][value_run];
    KVP_UNROLL for (int h = 0; h < value_heads; ++h)
      KVP_UNROLL for (int r = 0; r < value_run; ++r) sum[h][r] = splat(0.0f);
    for (int k = 0; k < here; ++k) {
      Lanes v[value_run];
      KVP_UNROLL for (int r = 0; r < value_run; ++r) v[r] = widen8(values + key_at[k] + at.d + 8 * r);
      const float* p = &s.weight[at.h0][k];
      KVP_UNROLL for (int h = 0; h < value_heads; ++h) {
        const Lanes w = splat(p[h * row_of_scores]);
        KVP_UNROLL for (int r = 0; r < value_run; ++r) sum[h][r] = fma8(w, v[r], sum[h][r]);
      }
    }
    KVP_UNROLL for (int h = 0; h < value_heads; ++h)
      KVP_UNROLL for (int r = 0; r < value_run; ++r)
        o[n][h][r] = fma8(splat(s.rescale[at.h0 + h]), o[n][h][r], sum[h][r]);
  }
}

template <bool AHEAD>
__device__ __forceinline__ void chunk_partial(const ChunkArguments& a) {
  __shared__ Shared s;
  KVP_DYNAMIC_SHARED(bf16, tile_keys);  // [KVP_TILE][staged_stride(width)]

  const int tid = threadIdx.x, chunk = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
  const int first = chunk * KVP_CHUNK;
  const int left = a.nk[row] - first, count = left < KVP_CHUNK ? left : KVP_CHUNK;
  const int* list = a.sparse[row] ? a.ids + static_cast<long long>(row) * a.capacity : nullptr;
  const bf16* keys = a.keys + kv_head * width;
  const bf16* values = a.values + kv_head * width;
  const long long head = static_cast<long long>(row) * a.chunks + chunk;
  float* out_o = a.o + (head * KVP_QUERY_HEADS + kv_head * KVP_GROUP) * width;
  float* out_m = a.m + head * KVP_QUERY_HEADS + kv_head * KVP_GROUP;
  float* out_l = a.l + head * KVP_QUERY_HEADS + kv_head * KVP_GROUP;

  auto look_up = [&](int tile) {
    for (int i = tid; i < KVP_TILE; i += KVP_THREADS) {
      int k = tile * KVP_TILE + i;
      if (k >= count) continue;
      s.key_at[tile & 1][i] = key_row(a.pages, list ? list[first + k] : first + k);
    }
  };
  auto keys_in = [&](int tile) { return count - tile * KVP_TILE < KVP_TILE ? count - tile * KVP_TILE : KVP_TILE; };

  for (int h = tid; h < KVP_GROUP; h += KVP_THREADS) {
    s.highest[0][h] = -KVP_INFINITY;
    s.normaliser[h] = 0.0f;
  }
  stage_queries(s.queries, a.q + (static_cast<long long>(row) * KVP_QUERY_HEADS + kv_head * KVP_GROUP) * width,
                KVP_GROUP * width);
  look_up(0);
  __syncthreads();
  const int tiles_here = count > 0 ? ceil_div(count, KVP_TILE) : 0;
  if (AHEAD && tiles_here) fetch_rows<width>(tile_keys, keys, s.key_at[0], keys_in(0));

  Values o;
  KVP_UNROLL for (int n = 0; n < value_items; ++n)
    KVP_UNROLL for (int h = 0; h < value_heads; ++h)
      KVP_UNROLL for (int r = 0; r < value_run; ++r) o[n][h][r] = splat(0.0f);

  for (int tile = 0; tile < tiles_here; ++tile) {
    const int here = keys_in(tile);
    if (AHEAD) {
      fetch_wait();
    } else {
      stage_rows<width>(tile_keys, keys, s.key_at[tile & 1], here);
    }
    __syncthreads();
    score_tile(s, tile_keys, here);
    look_up(tile + 1);
    __syncthreads();
    if (AHEAD && tile + 1 < tiles_here)
      fetch_rows<width>(tile_keys, keys, s.key_at[(tile + 1) & 1], keys_in(tile + 1));
    weigh_tile(s, tile);
    __syncthreads();
    sum_tile(s, values, s.key_at[tile & 1], here, o);
  }

  KVP_UNROLL for (int n = 0; n < value_items; ++n) {
    const ValueItem at(n);
    if (at.h0 >= KVP_GROUP) continue;
    KVP_UNROLL for (int h = 0; h < value_heads; ++h)
      KVP_UNROLL for (int r = 0; r < value_run; ++r) store8(out_o + (at.h0 + h) * width + at.d + 8 * r, o[n][h][r]);
  }
  for (int h = tid; h < KVP_GROUP; h += KVP_THREADS) {  // written by this thread, or behind the tile's last barrier
    out_m[h] = s.highest[tiles_here & 1][h];
    out_l[h] = s.normaliser[h];
  }
}

extern "C" __global__ void __launch_bounds__(KVP_THREADS)
    fn_attn_chunks(const bf16* keys, const bf16* values, Pages pages, const bf16* q, const int* ids, int capacity,
                   const int* nk, const int* sparse, float* o, float* m, float* l, int chunks) {
  chunk_partial<false>(ChunkArguments{keys, values, pages, q, ids, capacity, nk, sparse, o, m, l, chunks});
}

extern "C" __global__ void __launch_bounds__(KVP_THREADS)
    fn_attn_chunks_ahead(const bf16* keys, const bf16* values, Pages pages, const bf16* q, const int* ids,
                         int capacity, const int* nk, const int* sparse, float* o, float* m, float* l, int chunks) {
  chunk_partial<true>(ChunkArguments{keys, values, pages, q, ids, capacity, nk, sparse, o, m, l, chunks});
}
