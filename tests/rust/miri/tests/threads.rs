//! Teams: every item once, results where they belong, and memory that one thread wrote read by another.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use oxidion_miri::numbers::with_threads;
use oxidion_miri::threads;

#[test]
fn results_and_chunks_are_in_order_for_any_number_of_threads() {
    with_threads(&[1, 3, 2, 5], |count| {
        assert_eq!(threads::get(), count);
        let words = threads::map(23, |i| format!("{}", i * i));
        assert_eq!(words, (0..23).map(|i| (i * i).to_string()).collect::<Vec<_>>());
        let mut all = vec![0; 53];
        threads::chunks(&mut all, 10, |number, chunk| chunk.fill(number));
        assert_eq!(all, (0..53).map(|i| i / 10).collect::<Vec<_>>());
        threads::chunks(&mut all, 0, |number, chunk| chunk[0] = number);
        assert_eq!(all, (0..53).collect::<Vec<_>>());
    });
}

#[test]
fn shared_items_are_done_once_each_by_a_slot_that_works_on_one_at_a_time() {
    with_threads(&[1, 3], |_| {
        let (items, slots) = (Mutex::new(vec![0; 20]), [const { Mutex::new(0) }; 3]);
        threads::share(3, 20, |slot, item| {
            *slots[slot].try_lock().expect("a slot has one worker") += 1;
            items.lock().unwrap()[item] += 1;
        });
        assert_eq!(items.into_inner().unwrap(), vec![1; 20]);
        assert_eq!(slots.map(|slot| slot.into_inner().unwrap()).iter().sum::<usize>(), 20);
    });
}

#[test]
fn jobs_of_jobs_write_memory_of_the_items_that_posted_them() {
    with_threads(&[3, 4], |_| {
        let mut all: Vec<Vec<usize>> = (0..7).map(|i| vec![0; 5 * i]).collect();
        threads::run(|| {
            for round in 0..3 {
                threads::chunks(&mut all, 1, |i, own| {
                    threads::chunks(&mut own[0], 2, |j, part| {
                        part.iter_mut().for_each(|x| *x += i * 100 + j)
                    });
                });
                let expected = |i: usize, at: usize| (round + 1) * (i * 100 + at / 2);
                assert!(
                    all.iter()
                        .enumerate()
                        .all(|(i, own)| { own.iter().enumerate().all(|(at, x)| *x == expected(i, at)) })
                );
            }
        });
    });
}

/// Number of items from some level of jobs on; the first item of a level posts the next one.
fn items_below(level: usize) -> usize {
    let found = threads::map(2, |i| if i == 0 && level > 0 { items_below(level - 1) } else { 1 });
    found.into_iter().sum()
}

#[test]
fn jobs_beyond_the_places_of_a_team_are_done_by_who_has_them() {
    // A team has 33 places.
    with_threads(&[3], |_| assert_eq!(items_below(40), 42));
}

/// A thread that has looked at one job and takes up an item of the next would do what is gone.
#[test]
fn jobs_that_follow_each_other_in_one_place_do_items_of_their_own() {
    with_threads(&[3], |_| {
        threads::run(|| {
            for round in 0..40 {
                let mut items = [round; 2];
                threads::chunks(&mut items, 1, |i, item| item[0] = 10 * item[0] + i);
                assert_eq!(items, [10 * round, 10 * round + 1]);
            }
        });
    });
}

#[test]
fn a_panic_of_an_item_reaches_the_caller_after_all_items_and_the_next_job_is_done() {
    with_threads(&[1, 3], |count| {
        let done = Mutex::new(0);
        let said = catch_unwind(AssertUnwindSafe(|| {
            threads::each(11, |i| {
                *done.lock().unwrap() += 1;
                if i == 5 {
                    std::panic::resume_unwind(Box::new(format!("item {i}")));
                }
            });
        }));
        assert_eq!(said.unwrap_err().downcast_ref::<String>().unwrap(), "item 5");
        assert_eq!(done.into_inner().unwrap(), if count == 1 { 6 } else { 11 });
        let inside = catch_unwind(AssertUnwindSafe(|| {
            threads::run(|| -> usize {
                threads::each(4, |i| threads::each(3, |j| assert!(i + j < 9)));
                std::panic::resume_unwind(Box::new(7_usize))
            })
        }));
        assert_eq!(inside.unwrap_err().downcast_ref::<usize>(), Some(&7));
        assert_eq!(threads::run(|| threads::map(6, |i| i).len()), 6);
    });
}

#[test]
fn helpers_that_fell_asleep_are_woken() {
    with_threads(&[3], |_| {
        let sum = threads::run(|| {
            let first: usize = threads::map(4, |i| i).into_iter().sum();
            // Much longer than they wait for work.
            std::thread::sleep(std::time::Duration::from_millis(200));
            first + threads::map(4, |i| i).into_iter().sum::<usize>()
        });
        assert_eq!(sum, 12);
    });
}

#[test]
fn several_callers_have_a_region_each() {
    with_threads(&[2], |_| {
        std::thread::scope(|scope| {
            for caller in 0..3 {
                scope.spawn(move || {
                    assert_eq!(
                        threads::map(9, |i| i * caller),
                        (0..9).map(|i| i * caller).collect::<Vec<_>>()
                    );
                });
            }
        });
    });
}

/// The pool is forgotten with what it keeps: memory is left over.
#[cfg(feature = "rayon")]
#[test]
fn a_forked_process_gets_a_pool_of_its_own() {
    with_threads(&[3], |_| {
        assert_eq!(threads::map(5, |i| i), [0, 1, 2, 3, 4]);
        threads::forget_after_fork();
        assert_eq!(threads::map(5, |i| i), [0, 1, 2, 3, 4]);
    });
}
