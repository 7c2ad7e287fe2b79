use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use super::team::Team;
use super::*;

type Hire = dyn Fn(usize, &(dyn Fn() + Sync)) -> bool;

/// The ways to get threads, all available on this machine.
fn num_shards() -> [(&'static str, &'static Hire); 2] {
    [("openmp", &openmp::run), ("pool", &|_, _| false)]
}

/// The threads that run some tasks which wait for each other.
fn seen(threads: usize) -> BTreeSet<String> {
    let (all, found) = (Barrier::new(threads), Mutex::new(BTreeSet::new()));
    Team::with_current(|team| {
        team.each(threads, &|_| {
            all.wait();
            found.lock().unwrap().insert(format!("{:?}", std::thread::current().id()));
        });
    })
    .unwrap();
    found.into_inner().unwrap()
}

#[test]
fn every_way_hires_as_many_threads_including_the_caller() {
    for (name, hire) in num_shards() {
        for threads in [2, 3, 5] {
            let own = format!("{:?}", std::thread::current().id());
            let found = gather(threads, hire, || seen(threads));
            assert_eq!(found.len(), threads, "{name}");
            assert!(found.contains(&own), "{name}");
        }
        assert!(!Team::is_there(), "{name}");
    }
}

#[test]
fn openmp_of_libtorch_is_found() {
    assert!(openmp::run(1, &|| {}));
}

#[test]
fn every_item_is_done_once_in_jobs_of_jobs() {
    for (name, hire) in num_shards() {
        for (outer, inner) in [(1, 1), (2, 100), (100, 3), (40, 40), (7, 0)] {
            let counts: Vec<Vec<AtomicUsize>> =
                (0..outer).map(|_| (0..inner).map(|_| AtomicUsize::new(0)).collect()).collect();
            for round in 1..20 {
                gather(4, hire, || {
                    let team = |count, task: &(dyn Fn(usize) + Sync)| {
                        Team::with_current(|team| team.each(count, task)).unwrap();
                    };
                    team(outer, &|i| {
                        team(inner, &|j| {
                            counts[i][j].fetch_add(1, Ordering::Relaxed);
                        });
                    });
                });
                let all = counts.iter().flatten().all(|n| n.load(Ordering::Relaxed) == round);
                assert!(all, "{name} {outer} {inner} {round}");
            }
        }
    }
}

#[test]
fn helpers_that_fell_asleep_are_woken() {
    for (name, hire) in num_shards() {
        let found = gather(3, hire, || {
            seen(3);
            std::thread::sleep(Duration::from_millis(50));
            seen(3)
        });
        assert_eq!(found.len(), 3, "{name}");
    }
}

#[test]
fn panic_of_an_item_reaches_the_caller_and_threads_remain() {
    for (name, hire) in num_shards() {
        let done = AtomicUsize::new(0);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            gather(3, hire, || {
                let task = |i: usize| {
                    done.fetch_add(1, Ordering::Relaxed);
                    assert!(i != 5, "item five");
                };
                Team::with_current(|team| team.each(20, &task)).unwrap();
            });
        }));
        let said = panicked.unwrap_err();
        assert_eq!(said.downcast_ref::<&str>(), Some(&"item five"), "{name}");
        assert_eq!(done.load(Ordering::Relaxed), 20, "{name}");
        assert_eq!(gather(3, hire, || seen(3)).len(), 3, "{name}");
    }
}

#[test]
fn results_and_chunks_are_in_order() {
    for threads in [1, 4] {
        set(threads);
        assert_eq!(map(100, |i| i * i), (0..100).map(|i| i * i).collect::<Vec<_>>());
        let mut all = vec![0; 103];
        chunks(&mut all, 10, |number, chunk| chunk.fill(number));
        assert_eq!(all, (0..103).map(|i| i / 10).collect::<Vec<_>>());
        let (items, slots) = (Mutex::new(vec![0; 50]), AtomicUsize::new(0));
        share(3, 50, |slot, item| {
            slots.fetch_max(slot, Ordering::Relaxed);
            items.lock().unwrap()[item] += 1;
        });
        assert_eq!(items.into_inner().unwrap(), vec![1; 50]);
        assert!(slots.load(Ordering::Relaxed) < 3);
        set(1);
    }
}
