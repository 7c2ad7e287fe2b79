//! Matrices inside of memory: rows, columns and blocks written side by side, with what lies between them left alone.

use std::sync::Mutex;

use oxidion_miri::numbers::{FLOATS, Memory, read, with_threads, write};
use oxidion_miri::tensor::{DType, Element, FlatPtr, MatrixView, MatrixViewMut, Rect, Stack};
use oxidion_miri::threads;

/// A number for an element of a matrix.
fn mark(row: usize, col: usize) -> f64 {
    (row * 16 + col) as f64
}

/// Memory of -1 with marks where a matrix lies.
fn marked(len: usize, Rect { offset, rows, cols, stride }: Rect) -> Vec<f64> {
    let mut all = vec![-1.0; len];
    for row in 0..rows {
        (0..cols).for_each(|col| all[offset + row * stride + col] = mark(row, col));
    }
    all
}

fn minus_ones(dtype: DType, len: usize) -> Memory {
    Memory::of(dtype, &vec![-1.0; len])
}

fn matrix(memory: &mut Memory, Rect { offset, rows, cols, stride }: Rect) -> MatrixViewMut<'_> {
    memory.view_mut().into_matrix(offset, [rows, cols], stride)
}

const GAPS: Rect = Rect { offset: 2, rows: 7, cols: 5, stride: 8 };
const PACKED: Rect = Rect { offset: 3, rows: 4, cols: 6, stride: 6 };
const ROW: Rect = Rect { offset: 1, rows: 1, cols: 9, stride: 20 };
const LEN: usize = 60;

#[test]
fn rows_and_groups_of_rows_are_written_side_by_side() {
    for dtype in FLOATS {
        for rect in [GAPS, PACKED, ROW] {
            let mut memory = minus_ones(dtype, LEN);
            let rows: Vec<_> = matrix(&mut memory, rect).into_rows().collect();
            for (row, view) in rows.into_iter().enumerate().rev() {
                write(view, |col| mark(row, col));
            }
            assert_eq!(memory.numbers(), marked(LEN, rect));

            let mut memory = minus_ones(dtype, LEN);
            let runs: Vec<_> = matrix(&mut memory, rect).into_runs().collect();
            let gaps = rect.rows > 1 && rect.stride > rect.cols;
            assert_eq!(runs.len(), if gaps { rect.rows } else { 1 });
            for (run, view) in runs.into_iter().enumerate().rev() {
                write(view, |at| mark(run + at / rect.cols, at % rect.cols));
            }
            assert_eq!(memory.numbers(), marked(LEN, rect));

            for count in [3, 100] {
                let mut memory = minus_ones(dtype, LEN);
                let groups: Vec<_> = matrix(&mut memory, rect).into_groups(count).collect();
                for (group, part) in groups.into_iter().enumerate().rev() {
                    for (row, view) in part.into_rows().enumerate() {
                        write(view, |col| mark(group * count + row, col));
                    }
                }
                assert_eq!(memory.numbers(), marked(LEN, rect));
            }
        }
    }
}

#[test]
fn one_row_after_the_other_is_borrowed_and_read() {
    for dtype in FLOATS {
        for rect in [GAPS, PACKED, ROW] {
            let mut memory = minus_ones(dtype, LEN);
            let mut all = matrix(&mut memory, rect);
            for row in 0..rect.rows {
                write(all.row(row), |col| mark(row, col));
                assert_eq!(read(&all.view().row(row))[0], mark(row, 0));
            }
            assert!(all.row(rect.rows).is_empty());
            write(all.reborrow().into_row(0), |col| mark(0, col));
            let columns = rect.cols - 2;
            for (row, view) in all.reborrow().into_first_cols(columns).into_rows().enumerate() {
                write(view, |col| mark(row, col));
            }
            let view = all.into_view();
            assert_eq!(view.shape(), [rect.rows, rect.cols]);
            let runs: Vec<f64> = view.runs().flat_map(|run| read(&run)).collect();
            let marks =
                |rows: usize, cols: usize| (0..rows).flat_map(move |i| (0..cols).map(move |j| mark(i, j)));
            assert_eq!(runs, marks(rect.rows, rect.cols).collect::<Vec<_>>());
            let first: Vec<f64> = view.first_cols(columns).runs().flat_map(|run| read(&run)).collect();
            assert_eq!(first, marks(rect.rows, columns).collect::<Vec<_>>());
            let last = view.rows(rect.rows - 1, 9);
            assert_eq!((last.shape()[0], read(&last.row(0))[1]), (1, mark(rect.rows - 1, 1)));
            assert_eq!(view.flat().map(|flat| flat.len()), view.is_flat().then_some(rect.rows * rect.cols));
            assert_eq!(memory.numbers(), marked(LEN, rect));
        }
    }
}

#[test]
fn groups_of_columns_are_written_by_several_threads_at_once() {
    with_threads(&[3], |_| {
        for dtype in FLOATS {
            for count in [1, 2] {
                let mut memory = minus_ones(dtype, LEN);
                let mut groups: Vec<_> = matrix(&mut memory, GAPS).into_col_groups(count).collect();
                assert_eq!(groups.len(), GAPS.cols.div_ceil(count));
                for round in 0..2 {
                    threads::chunks(&mut groups, 1, |group, part| {
                        for row in 0..GAPS.rows {
                            // What was written before is read, so that a mark of another thread would show.
                            let before = read(&part[0].view().row(row));
                            assert!(before.iter().enumerate().all(|(col, x)| {
                                *x == if round == 0 { -1.0 } else { mark(row, group * count + col) }
                            }));
                            write(part[0].row(row), |col| mark(row, group * count + col));
                        }
                    });
                }
                assert_eq!(memory.numbers(), marked(LEN, GAPS));
            }
        }
    });
}

#[test]
fn several_matrices_of_one_buffer_are_written_at_once() {
    // Two blocks of columns side by side, rows between the rows of another matrix, and a matrix with no elements.
    let places = [
        Rect { offset: 1, rows: 3, cols: 2, stride: 9 },
        Rect { offset: 4, rows: 3, cols: 4, stride: 9 },
        Rect { offset: 30, rows: 3, cols: 3, stride: 8 },
        Rect { offset: 33, rows: 2, cols: 5, stride: 8 },
        Rect { offset: 50, rows: 0, cols: 4, stride: 4 },
        Rect::packed(52, 2, 4),
    ];
    with_threads(&[1, 3], |_| {
        for dtype in FLOATS {
            let mut memory = minus_ones(dtype, LEN);
            let mut all = memory.view_mut().into_matrices(&places).unwrap();
            threads::chunks(&mut all, 1, |number, part| {
                for row in 0..part[0].shape()[0] {
                    write(part[0].row(row), |col| (100 * number) as f64 + mark(row, col));
                }
            });
            let mut expected = vec![-1.0; LEN];
            for (number, place) in places.iter().enumerate() {
                let marks = marked(LEN, *place);
                for (to, mark) in expected.iter_mut().zip(marks).filter(|(_, mark)| *mark >= 0.0) {
                    *to = (100 * number) as f64 + mark;
                }
            }
            let rounded = Memory::of(dtype, &expected).numbers();
            assert_eq!(memory.numbers(), rounded);
        }
    });
    let mut memory = minus_ones(DType::F32, LEN);
    let shared = [Rect::packed(0, 3, 4), Rect { offset: 11, rows: 2, cols: 1, stride: 9 }];
    assert!(memory.view_mut().into_matrices(&shared).is_err());
    assert!(memory.view_mut().into_matrices(&[Rect::packed(50, 3, 4)]).is_err());
}

/// Units of a parameter, as the session makes them: views of one address without common elements.
#[test]
fn matrices_of_one_address_are_written_by_several_threads() {
    with_threads(&[3], |_| {
        let mut memory = minus_ones(DType::F32, LEN);
        let ptr: FlatPtr = memory.ptr();
        threads::each(4, |block| {
            // SAFETY: blocks of two columns have no element both, and the memory is used in no other way meanwhile.
            let unit = unsafe { ptr.matrix_mut(None, 2 + 2 * block, [6, 2], 8) };
            for (row, view) in unit.into_rows().enumerate() {
                write(view, |col| mark(row, 2 * block + col));
            }
        });
        let expected = marked(LEN, Rect { offset: 2, rows: 6, cols: 8, stride: 8 });
        assert_eq!(memory.numbers(), expected);
    });
}

/// Adds to the elements of a matrix by its address, as kernels with pointers do.
fn add<T: Element + std::ops::AddAssign>(matrix: &mut MatrixViewMut<'_>, number: T) {
    let [rows, cols] = matrix.shape();
    let (mut out, stride) = matrix.strided();
    assert_eq!(out.len(), (rows - 1) * stride + cols);
    let first = out.pointer::<T>();
    for at in (0..rows).flat_map(|row| (0..cols).map(move |col| row * stride + col)) {
        // SAFETY: an element of the matrix, which is borrowed to be written.
        unsafe { *first.add(at) += number };
    }
}

fn sum<T: Element + Into<f64>>(matrix: &MatrixView<'_>) -> f64 {
    let ([rows, cols], (x, stride)) = (matrix.shape(), matrix.strided());
    let first = x.part(0, x.len()).pointer::<T>();
    let all = (0..rows).flat_map(|row| (0..cols).map(move |col| row * stride + col));
    // SAFETY: an element of the matrix, which is borrowed to be read.
    all.map(|at| unsafe { *first.add(at) }.into()).sum()
}

#[test]
fn elements_are_written_by_address_next_to_those_of_others() {
    with_threads(&[1, 3], |_| {
        let mut memory = minus_ones(DType::F32, LEN);
        let all = matrix(&mut memory, GAPS);
        let groups: Vec<_> = all.into_col_groups(2).map(Mutex::new).collect();
        threads::share(3, groups.len(), |_, group| {
            let mut own = groups[group].lock().unwrap();
            add(&mut own, 1.0 + group as f32);
            write(own.row(1), |_| 8.0);
            add(&mut own, 0.5_f32);
            let elements = own.shape()[1] as f64;
            assert_eq!(sum::<f32>(&own.view()), elements * (6.0 * (group as f64 + 0.5) + 8.5));
        });
        drop(groups);
        let mut expected = vec![-1.0; LEN];
        for (row, col) in (0..7).flat_map(|row| (0..5).map(move |col| (row, col))) {
            expected[2 + row * 8 + col] = if row == 1 { 8.5 } else { (col / 2) as f64 + 0.5 };
        }
        assert_eq!(memory.numbers(), expected);
        let (mut strided, stride) = matrix(&mut memory, PACKED).into_strided();
        assert_eq!((strided.view().len(), strided.reborrow().into_part(20, 9).len(), stride), (24, 4, 6));
        assert!(!strided.pointer::<f32>().is_null());
    });
}

#[test]
fn a_matrix_beyond_its_memory_or_with_rows_that_share_elements_is_refused() {
    let refused = |offset: usize, shape: [usize; 2], stride: usize| {
        let mut memory = Memory::new(DType::F16, 20);
        let make =
            std::panic::AssertUnwindSafe(|| memory.view_mut().into_matrix(offset, shape, stride).shape());
        std::panic::catch_unwind(make).is_err()
    };
    std::panic::set_hook(Box::new(|_| ()));
    let found = [refused(0, [3, 4], 8), refused(1, [3, 4], 8), refused(0, [3, 4], 3), refused(30, [0, 4], 1)];
    let _ = std::panic::take_hook();
    assert_eq!(found, [false, true, true, false]);
}

#[test]
fn a_stack_holds_matrices_of_one_memory_at_equal_distances() {
    let memory = Memory::new(DType::F64, 60);
    let block = |first: usize| memory.view().matrix(first, [3, 2], 6);
    let two = Stack::new(&block(0)).with(&block(2)).unwrap();
    assert!(two.with(&block(4)).is_some());
    assert!(two.with(&block(5)).is_none());
    let other = Memory::new(DType::F64, 60);
    assert!(Stack::new(&block(0)).with(&other.view().matrix(0, [3, 2], 6)).is_none());
}
