//! Views of elements: parts of them written side by side, copies, other types, addresses.

use oxidion_miri::numbers::{FLOATS, Memory, random, read, with_threads, write};
use oxidion_miri::tensor::{DType, Device, FlatPtr, FlatView, FlatViewMut};
use oxidion_miri::threads;

/// The numbers as they are after they were rounded to a type.
fn rounded(dtype: DType, numbers: &[f64]) -> Vec<f64> {
    Memory::of(dtype, numbers).numbers()
}

#[test]
fn parts_of_a_view_are_written_side_by_side_and_nothing_else_is() {
    for dtype in FLOATS {
        let mut memory = Memory::random(dtype, 37, 1);
        let mut expected = memory.numbers();
        let (low, mut high) = memory.view_mut().split_at(13);
        let first = high.take_first(5);
        let nothing = high.take_first(0);
        let chunks: Vec<_> = high.chunks(6).collect();
        assert_eq!(chunks.iter().map(FlatViewMut::len).collect::<Vec<_>>(), [6, 6, 6, 1]);
        assert!(nothing.is_empty());
        // The last one first: all of them are there at once.
        for (number, chunk) in chunks.into_iter().enumerate().rev() {
            write(chunk, |at| (10 * number + at) as f64);
        }
        write(first, |at| 100.0 + at as f64);
        write(low, |at| -(at as f64));
        write(nothing, |_| f64::NAN);
        (0..13).for_each(|at| expected[at] = -(at as f64));
        (0..5).for_each(|at| expected[13 + at] = 100.0 + at as f64);
        (0..19).for_each(|at| expected[18 + at] = (10 * (at / 6) + at % 6) as f64);
        assert_eq!(memory.numbers(), expected);
    }
}

#[test]
fn slices_of_two_halves_are_written_in_turns() {
    let mut memory = Memory::new(DType::F32, 12);
    let (low, high) = memory.view_mut().split_at(5);
    let (low, high) = (low.into_slice::<f32>(), high.into_slice::<f32>());
    for (at, number) in [0.5_f32, 1.5, 2.5, 3.5, 4.5].into_iter().enumerate() {
        low[at] = number;
        high[at + 2] = low[at] + 10.0;
        low[at] += high[at + 2];
    }
    high[..2].fill(-1.0);
    let expected = [11.0, 13.0, 15.0, 17.0, 19.0, -1.0, -1.0, 10.5, 11.5, 12.5, 13.5, 14.5];
    assert_eq!(memory.numbers(), expected);
}

#[test]
fn a_view_is_used_again_after_what_was_borrowed_from_it() {
    for dtype in FLOATS {
        let mut memory = Memory::random(dtype, 9, 2);
        let mut expected = memory.numbers();
        let mut view = memory.view_mut();
        write(view.reborrow(), |at| at as f64);
        assert_eq!(read(&view.view()), (0..9).map(f64::from).collect::<Vec<_>>());
        write(view.part(4, 100), |at| 50.0 + at as f64);
        write(view.part(9, 3), |_| f64::NAN);
        write(view.part(77, 3), |_| f64::NAN);
        write(view.reborrow().into_part(2, 1), |_| 7.0);
        let (read_only, mut others) = (view.view().part(4, 2), Vec::new());
        others.extend([read(&read_only), read(&view.view().part(0, 3))]);
        assert_eq!(others, [vec![50.0, 51.0], vec![0.0, 1.0, 7.0]]);
        write(view.part(0, 2), |_| -3.0);
        let all = view.into_view();
        (0..9).for_each(|at| expected[at] = if at < 4 { at as f64 } else { 46.0 + at as f64 });
        (expected[0], expected[1], expected[2]) = (-3.0, -3.0, 7.0);
        assert_eq!(read(&all), expected);
        assert_eq!(memory.numbers(), expected);
    }
}

#[test]
fn elements_are_copied_within_a_view_and_from_another_one() {
    for dtype in FLOATS {
        let numbers = random(31, 3);
        let mut expected = rounded(dtype, &numbers);
        let mut memory = Memory::of(dtype, &numbers);
        for [from, to, count] in [[0, 3, 20], [7, 2, 24], [30, 0, 1], [4, 4, 9], [31, 31, 0]] {
            memory.view_mut().copy_within(from, to, count);
            expected.copy_within(from..from + count, to);
            assert_eq!(memory.numbers(), expected);
        }
        let other = Memory::random(dtype, 11, 4);
        memory.view_mut().part(5, 8).copy_from(other.view().part(1, 100));
        memory.view_mut().part(20, 11).copy_from(other.view().part(0, 2));
        memory.view_mut().part(0, 0).copy_from(other.view());
        expected[5..13].copy_from_slice(&other.numbers()[1..9]);
        expected[20..22].copy_from_slice(&other.numbers()[..2]);
        assert_eq!(memory.numbers(), expected);
        // From one half of a view to the other.
        let (low, mut high) = memory.view_mut().split_at(15);
        high.part(1, 15).copy_from(low.view());
        drop(low);
        expected.copy_within(0..15, 16);
        memory.view_mut().part(3, 4).clear().unwrap();
        let mut nothing = FlatViewMut::EMPTY;
        nothing.clear().unwrap();
        nothing.copy_from(FlatView::EMPTY);
        nothing.copy_within(0, 0, 0);
        expected[3..7].fill(0.0);
        assert_eq!(memory.numbers(), expected);
    }
}

#[test]
#[should_panic(expected = "beyond the end")]
fn elements_are_not_moved_beyond_the_end() {
    Memory::new(DType::F64, 4).view_mut().copy_within(0, 2, 3);
}

#[test]
fn a_counter_counts_and_others_do_not() {
    let mut counter = Memory::of(DType::F32, &[41.0]);
    assert_eq!(counter.view_mut().increment(), 42.0);
    assert_eq!((counter.view().count(), counter.numbers()), (42.0, vec![42.0]));
    assert!(Memory::of(DType::F64, &[1.0]).view_mut().increment().is_nan());
    assert!(Memory::of(DType::F32, &[1.0, 2.0]).view().count().is_nan());
}

#[test]
fn elements_of_the_wrong_type_or_place_are_refused() {
    let mut memory = Memory::of(DType::F64, &[1.0, 2.0]);
    assert!(memory.view().as_slice::<f32>().is_err());
    assert_eq!(memory.view().as_slice::<f64>().unwrap(), [1.0, 2.0]);
    memory.view_mut().as_mut_slice::<f64>().unwrap()[1] = 3.0;
    assert!(memory.view_mut().on(Device::Cuda(0)).as_mut_slice::<f64>().is_err());
    assert_eq!(memory.view().numbers(), [1.0, 3.0]);
    assert!(Memory::of(DType::F32, &[1.0]).view().numbers().is_empty());
    assert!(FlatView::EMPTY.slice::<f32>().is_empty());
    assert!(FlatViewMut::EMPTY.into_slice::<f32>().is_empty());
}

#[test]
fn memory_is_taken_as_another_type() {
    let mut words = vec![0_u64; 5];
    let mut view = FlatViewMut::over(&mut words, DType::F64).retyped(9, DType::F32).unwrap();
    write(view.reborrow(), |at| at as f64);
    assert_eq!(view.view().slice::<f32>()[8], 8.0);
    let view = view.retyped(17, DType::BF16).unwrap();
    write(view, |at| at as f64);
    assert!(FlatViewMut::over(&mut words, DType::F64).retyped(11, DType::F32).is_err());
    let found = read(&FlatView::over(&words, DType::BF16).part(0, 17));
    assert_eq!(found, (0..17).map(f64::from).collect::<Vec<_>>());
    // Behind the last number of bfloat16 is the upper half of one of float32.
    assert_eq!(words[4], u64::from(8.0_f32.to_bits() >> 16 << 16 | 0x4180));
}

/// Buffers of an arena, as the session keeps them: addresses from which each thread makes views.
#[test]
fn buffers_of_one_arena_are_written_by_several_threads() {
    let mut arena = vec![0_u64; 40];
    let all = FlatPtr::over(&mut arena, DType::F32);
    let lay = |offset, len, dtype| all.carve(offset, len, dtype).unwrap();
    let buffers: Vec<FlatPtr> = vec![
        lay(0, 7, DType::F32),
        lay(28, 3, DType::BF16),
        lay(40, 9, DType::F64),
        lay(112, 5, DType::F16),
        lay(124, 20, DType::F32),
    ];
    for (at, one) in buffers.iter().enumerate() {
        assert!(buffers[at + 1..].iter().all(|other| !one.overlaps(other) && !other.overlaps(one)));
        assert!(one.overlaps(&all));
    }
    assert!(all.carve(160, 41, DType::F32).is_err());
    assert!(all.carve(2, 1, DType::F32).is_err());
    with_threads(&[3], |_| {
        for round in 0..2 {
            threads::each(buffers.len(), |i| {
                // SAFETY: the buffers do not overlap, each is one thread's, and the arena is used in no other way meanwhile.
                let mut view = unsafe { buffers[i].view_mut(None) };
                write(view.reborrow(), |at| (100 * round + 10 * i + at) as f64);
                let (low, high) = view.split_at(2);
                assert_eq!(read(&high.view())[0], (100 * round + 10 * i + 2) as f64);
                drop(low);
            });
            for (i, buffer) in buffers.iter().enumerate() {
                // SAFETY: all threads are done.
                let found = read(&unsafe { buffer.view(None) });
                assert_eq!(
                    found,
                    (0..buffer.len()).map(|at| (100 * round + 10 * i + at) as f64).collect::<Vec<_>>()
                );
            }
        }
    });
    assert_eq!(arena[0], u64::from(100.0_f32.to_bits()) | u64::from(101.0_f32.to_bits()) << 32);
}

#[test]
fn memory_is_asked_for_without_being_read() {
    let memory = Memory::new(DType::F64, 20);
    memory.view().prefetch(3, 1000);
    memory.view().prefetch(1000, 3);
    let mut counter = Memory::of(DType::F32, &[1.0]);
    counter.ptr().prefetch_number();
}
