// Threads that run one function together, as if it were written for one, with barriers in it.
//
// Between two calls of run the helpers sleep on a condition variable: an idle node uses no CPU.
// Inside a call they spin, because a step has some 240 barriers and a sleep costs as much as the
// work between two of them; after a while they yield, for machines with more threads than cores.
#pragma once
#include <pthread.h>
#include <stdint.h>

class Team {
  public:
    explicit Team(int size);
    ~Team();
    int size() const;

    // work(argument, thread) on every thread, thread 0 being the caller's.
    void run(void (*work)(void*, int), void* argument);

    // Waits for all; what was written before is seen after. Starts take() again from 0.
    void barrier();

    // The next of a phase's items for whoever asks first; a phase ends with a barrier.
    int64_t take();

  private:
    static void* helper_main(void* argument);

    int size_;
    pthread_t* helpers_;
    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t wake_ = PTHREAD_COND_INITIALIZER;
    void (*work_)(void*, int) = nullptr;
    void* argument_ = nullptr;
    uint64_t num_runs_ = 0;
    bool stopping_ = false;
    int next_helper_ = 1;
    alignas(64) int64_t next_ = 0;
    alignas(64) int num_arrived_ = 0;
    alignas(64) int phase_ = 0;
};
