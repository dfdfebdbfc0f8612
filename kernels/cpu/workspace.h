// A runner's buffers: grown when a step needs more, zeroed, kept for the next.
#pragma once
#include "api.h"

class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    ~Buffer();

    // Memory of at least this size; what it held is lost if it has to grow. Zero when new.
    template <class T>
    T* reserve(int64_t count) {
        return static_cast<T*>(reserve_bytes(count * sizeof(T)));
    }

  private:
    void* reserve_bytes(int64_t size);

    void* data_ = nullptr;
    int64_t size_ = 0;
};

class Workspaces {
  public:
    explicit Workspaces(int num_threads);
    ~Workspaces();

    // 0, or -1 for a token id outside the vocabulary, -2 for a block outside the pool.
    int prepare(const Model& model, const Step& step, Workspace* w);

    // For attention alone.
    void prepare_attention(int64_t head_dim_p, int64_t num_kv_heads, int64_t longest_context,
                           Workspace* w);

    // The slots and rows of a batch, over a pool; -2 for a block outside it.
    int prepare_rows(const Row* rows, int64_t num_rows, const int32_t* tables, const Pool& pool,
                     Workspace* w);

  private:
    int num_threads_;
    Buffer x_, drawn_, normed_, qkv_, q_, attended_, gated_, slots_, rows_, draw_rows_, packed_;
    Buffer* thread_scratch_;
    uint8_t** scratch_;
};
