//! Sums over elements, several side by side.

/// Elements that are worked on side by side.
pub(in crate::kernels) const LANES: usize = 16;

/// Sums a value over the elements of equally long slices, in lanes. Inside `value` the slices are arrays of as many
/// elements as there are lanes, so that no index has to be checked.
macro_rules! sums {
    ($($slice:ident),+; $($written:ident),*; $j:ident => $value:expr) => {{
        let mut lanes = [C::default(); LANES];
        let len = [$($slice.len()),+][0];
        let mut start = 0;
        while let ($(Some($slice),)+ $(Some($written),)*) = (
            $($slice.get(start..).and_then(|rest| rest.first_chunk::<LANES>()),)+
            $($written.get_mut(start..).and_then(|rest| rest.first_chunk_mut::<LANES>()),)*
        ) {
            for $j in 0..LANES {
                lanes[$j] = lanes[$j] + $value;
            }
            start += LANES;
        }
        $(let $slice = &$slice[start..len];)+
        $(let $written = &mut $written[start..len];)*
        for $j in 0..len - start {
            lanes[$j] = lanes[$j] + $value;
        }
        lanes.iter().map(|lane| lane.wide()).sum::<f64>()
    }};
}
pub(in crate::kernels) use sums;
