#include "team.h"

#include <sched.h>

// About 20 us; a barrier is normally passed within one.
constexpr int SPINS_BEFORE_YIELD = 1000;

static void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

Team::Team(int size) : size_(size), helpers_(new pthread_t[size]) {
    for (int index = 1; index < size; index++) {
        if (pthread_create(&helpers_[index], nullptr, helper_main, this) != 0) {
            size_ = index;
            break;
        }
    }
}

Team::~Team() {
    pthread_mutex_lock(&mutex_);
    stopping_ = true;
    pthread_cond_broadcast(&wake_);
    pthread_mutex_unlock(&mutex_);
    for (int index = 1; index < size_; index++) pthread_join(helpers_[index], nullptr);
    delete[] helpers_;
}

int Team::size() const { return size_; }

int64_t Team::take() { return __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED); }

void Team::run(void (*work)(void*, int), void* argument) {
    if (size_ > 1) {
        pthread_mutex_lock(&mutex_);
        work_ = work;
        argument_ = argument;
        num_runs_++;
        pthread_cond_broadcast(&wake_);
        pthread_mutex_unlock(&mutex_);
    }
    work(argument, 0);
    // The argument is the caller's: nobody may still look at it after this.
    barrier();
}

void Team::barrier() {
    if (size_ == 1) {
        next_ = 0;
        return;
    }
    int phase = __atomic_load_n(&phase_, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&num_arrived_, 1, __ATOMIC_ACQ_REL) == size_) {
        next_ = 0;
        num_arrived_ = 0;
        __atomic_store_n(&phase_, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&phase_, __ATOMIC_ACQUIRE) == phase; spins++) {
        if (spins < SPINS_BEFORE_YIELD) {
            pause_briefly();
        } else {
            sched_yield();
        }
    }
}

void* Team::helper_main(void* argument) {
    Team* team = static_cast<Team*>(argument);
    int index = __atomic_fetch_add(&team->next_helper_, 1, __ATOMIC_RELAXED);
    uint64_t num_done = 0;
    while (true) {
        pthread_mutex_lock(&team->mutex_);
        while (team->num_runs_ == num_done && !team->stopping_) {
            pthread_cond_wait(&team->wake_, &team->mutex_);
        }
        if (team->stopping_) {
            pthread_mutex_unlock(&team->mutex_);
            return nullptr;
        }
        num_done = team->num_runs_;
        pthread_mutex_unlock(&team->mutex_);
        team->work_(team->argument_, index);
        team->barrier();
    }
}
