//! Uses of views that must not compile, as tests of the documentation; each names the error that the compiler gives.
//!
//! A [`FlatViewMut`](super::FlatViewMut) is neither copied nor cloned, so no two views of one element are written:
//!
//! ```compile_fail,E0382
//! use _oxidion::tensor::FlatViewMut;
//! fn twice(view: FlatViewMut<'_>) {
//!     let (mut low, _high) = view.split_at(1);
//!     low.slice_mut::<f32>()[0] = 1.0;
//!     let _again = view; // moved by `split_at`
//! }
//! ```
//!
//! ```compile_fail,E0499
//! use _oxidion::tensor::FlatViewMut;
//! fn both(view: &mut FlatViewMut<'_>) {
//!     let one = view.slice_mut::<f32>();
//!     let other = view.slice_mut::<f32>();
//!     one[0] = other[0];
//! }
//! ```
//!
//! ```compile_fail,E0277
//! fn copied<T: Copy>() {}
//! copied::<_oxidion::tensor::FlatViewMut<'static>>();
//! ```
//!
//! A view does not outlive what it was borrowed from, an arena or a tensor:
//!
//! ```compile_fail,E0505
//! use _oxidion::tensor::{DType, FlatViewMut};
//! let mut memory = vec![0_u64; 4];
//! let mut view = FlatViewMut::over(&mut memory, DType::F64);
//! drop(memory);
//! view.slice_mut::<f64>()[0] = 1.0;
//! ```
//!
//! ```
//! use _oxidion::tensor::{DType, FlatViewMut};
//! let mut memory = vec![0_u64; 4];
//! let (mut low, mut high) = FlatViewMut::over(&mut memory, DType::F64).split_at(1);
//! low.slice_mut::<f64>()[0] = 1.0;
//! high.slice_mut::<f64>()[0] = 2.0;
//! assert_eq!(memory[..2], [1.0_f64.to_bits(), 2.0_f64.to_bits()]);
//! ```
//!
//! ```compile_fail,E0382
//! use _oxidion::tensor::MatrixViewMut;
//! fn twice(matrix: MatrixViewMut<'_>) {
//!     let rows = matrix.into_rows();
//!     let _again = matrix.into_rows(); // moved above
//!     drop(rows);
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use _oxidion::tensor::FlatView;
//! let tensor = tch::Tensor::zeros([4], (tch::Kind::Float, tch::Device::Cpu));
//! let view = unsafe { FlatView::from_tensor(&tensor) }.unwrap();
//! drop(tensor);
//! assert_eq!(view.slice::<f32>(), [0.0; 4]);
//! ```
//!
//! A tensor over a view goes before the view does:
//!
//! ```compile_fail,E0505
//! use _oxidion::tensor::{DType, FlatViewMut};
//! let mut memory = vec![0_u64; 4];
//! let tensor = FlatViewMut::over(&mut memory, DType::F64).into_tensor(&[4]);
//! drop(memory);
//! assert!(tensor.is_ok());
//! ```
