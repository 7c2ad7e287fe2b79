//! Classes of symmetric products by size, and for each whether the kernel or the library was measured to be the faster one.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Rows of the first class; those of every other one are twice as many.
const ROWS: usize = 256;
/// Classes by rows, by how many times as many columns there are (1, 2, 4), by matrices (1, 2, 4, ...).
const SIZES: [usize; 3] = [5, 3, 6];

/// Products of about one size: those whose numbers are nearest to its own, with addends or without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductClass {
    /// Rows of each matrix.
    pub rows: usize,
    /// Columns of each factor.
    pub depth: usize,
    /// Matrices.
    pub count: usize,
    /// True if something is added.
    pub adds: bool,
}

impl ProductClass {
    /// All of them, in order.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let [rows, depths, counts] = SIZES.map(|n| (0..n).map(|i| 1 << i).collect::<Vec<usize>>());
        let mut all = Vec::new();
        for rows in rows.iter().map(|times| ROWS * times) {
            for depth in depths.iter().map(|times| rows * times) {
                for &count in &counts {
                    all.extend([false, true].map(|adds| Self { rows, depth, count, adds }));
                }
            }
        }
        all
    }

    /// The number of the class of a product.
    #[must_use]
    pub fn number(rows: usize, depth: usize, count: usize, adds: bool) -> usize {
        let at = [nearest(rows, ROWS), nearest(depth, rows), nearest(count, 1)];
        let [row, depth, count] = [0, 1, 2].map(|i| at[i].min(SIZES[i] - 1));
        ((row * SIZES[1] + depth) * SIZES[2] + count) * 2 + usize::from(adds)
    }
}

/// The power of two by which `unit` is to be multiplied to come nearest to `n`, at least 0: the next one from √2 times on.
fn nearest(n: usize, unit: usize) -> usize {
    let mut power = 0;
    // (n / (unit 2^power))² >= 2
    while n.saturating_mul(n) / 2 >= (unit << power).max(1).saturating_pow(2) && power < 40 {
        power += 1;
    }
    power
}

static WINS: Mutex<BTreeMap<usize, Vec<Option<bool>>>> = Mutex::new(BTreeMap::new());

/// Sets for each class of a device whether the kernel is the faster way, or `None` where this was not measured. An empty list
/// removes all of them.
pub fn set_measured(device: usize, wins: Vec<Option<bool>>) {
    let mut measured = WINS.lock().unwrap_or_else(PoisonError::into_inner);
    if wins.is_empty() {
        measured.remove(&device);
    } else {
        measured.insert(device, wins);
    }
}

/// Returns what was measured for a class of a device.
#[cfg(feature = "cuda")]
pub(super) fn measured(device: usize, class: usize) -> Option<bool> {
    *WINS.lock().unwrap_or_else(PoisonError::into_inner).get(&device)?.get(class)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_has_the_number_of_its_own_size() {
        let all = ProductClass::all();
        assert_eq!(all.len(), 2 * SIZES.iter().product::<usize>());
        for (number, class) in all.iter().enumerate() {
            let ProductClass { rows, depth, count, adds } = *class;
            assert_eq!(ProductClass::number(rows, depth, count, adds), number);
        }
    }

    #[test]
    fn other_sizes_go_to_the_nearest_class() {
        let of = |rows, depth, count| ProductClass::all()[ProductClass::number(rows, depth, count, false)];
        let sizes = |class: ProductClass| (class.rows, class.depth, class.count);
        assert_eq!(sizes(of(129, 129, 1)), (256, 256, 1));
        assert_eq!(sizes(of(300, 400, 3)), (256, 256, 4));
        assert_eq!(sizes(of(400, 1200, 5)), (512, 2048, 4));
        assert_eq!(sizes(of(16384, 53248, 100)), (4096, 16384, 32));
    }
}
