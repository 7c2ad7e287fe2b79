//! Products against sums in float64, for every kernel that this machine can run.

use tch::{Device, Kind, Tensor};

use super::*;
use crate::tensor::test_views::{view, view_mut};

/// All kernels that this machine has the instructions for, not only those that are chosen.
fn kernels() -> Vec<Kernel> {
    let features = Features::detect(DType::BF16);
    let mut found = Vec::new();
    if features.avx2 {
        found.extend([Kernel::F32Avx2, Kernel::F64Avx2, Kernel::Bf16Avx2]);
    }
    if features.avx512 {
        found.extend([Kernel::F32Avx512, Kernel::F64Avx512]);
    }
    if features.avx512 && features.avx512_bf16 {
        found.push(Kernel::Bf16Avx512);
    }
    if features.avx512 && (features.amx_bf16 || can_be_emulated()) {
        found.push(Kernel::Bf16Amx);
    }
    found
}

/// Installs the emulation of AMX instructions, and tests whether that succeeded.
fn can_be_emulated() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
    {
        super::amx_emulated::install()
    }
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux", not(miri))))]
    {
        false
    }
}

fn random(rows: usize, cols: usize, kernel: Kernel, seed: i64) -> Tensor {
    tch::manual_seed(seed);
    let shape = [rows, cols].map(|n| i64::try_from(n).unwrap());
    Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kernel.dtype().kind())
}

fn blank(elements: usize, kernel: Kernel) -> Tensor {
    let elements = i64::try_from(elements).unwrap();
    Tensor::full([elements], f64::NAN, (kernel.dtype().kind(), Device::Cpu))
}

/// Packs both operands and multiplies into `out`.
fn multiply(kernel: Kernel, [left, right]: [Operand<'_>; 2], product: &mut Product<'_>, spread: bool) {
    let [m, n, k] = product.size;
    let panels =
        [blank(kernel.elements(Side::Left, m, k), kernel), blank(kernel.elements(Side::Right, n, k), kernel)];
    let [mut for_left, mut for_right] = panels.each_ref().map(view_mut);
    kernel.pack(Side::Left, &left, &mut for_left, spread).unwrap();
    kernel.pack(Side::Right, &right, &mut for_right, spread).unwrap();
    kernel.multiply(&for_left.view(), &for_right.view(), product, spread).unwrap();
}

fn rows_of(x: &Tensor) -> Operand<'_> {
    let [rows, cols] = [0, 1].map(|d| usize::try_from(x.size()[d]).unwrap());
    Operand { x: view(x).into(), count: rows, inner: cols, steps: [cols, 1] }
}

fn columns_of(x: &Tensor) -> Operand<'_> {
    let Operand { x, count, inner, steps } = rows_of(x);
    Operand { x, count: inner, inner: count, steps: [steps[1], steps[0]] }
}

fn tolerance(kernel: Kernel) -> f64 {
    // Sums of up to 260 products in float32 or float64; one rounding to bfloat16.
    match kernel.dtype() {
        DType::F64 => 1e-14,
        DType::F32 => 1e-6,
        _ => 4e-3,
    }
}

fn relative(a: &Tensor, b: &Tensor) -> f64 {
    ((a.to_kind(Kind::Double) - b).norm() / b.norm().clamp_min(1e-300)).double_value(&[])
}

#[test]
fn features_choose_the_kernel() {
    let none = Features::default();
    let avx2 = Features { avx2: true, ..none };
    let avx512 = Features { avx512: true, ..avx2 };
    let bf16 = Features { avx512_bf16: true, ..avx512 };
    let amx = Features { amx_bf16: true, ..bf16 };
    for (features, expected) in [
        (none, [None, None, None]),
        (avx2, [Some(Kernel::F32Avx2), Some(Kernel::F64Avx2), Some(Kernel::Bf16Avx2)]),
        (avx512, [Some(Kernel::F32Avx512), Some(Kernel::F64Avx512), Some(Kernel::Bf16Avx2)]),
        (bf16, [Some(Kernel::F32Avx512), Some(Kernel::F64Avx512), Some(Kernel::Bf16Avx512)]),
        (amx, [Some(Kernel::F32Avx512), Some(Kernel::F64Avx512), Some(Kernel::Bf16Amx)]),
    ] {
        let chosen = [DType::F32, DType::F64, DType::BF16].map(|dtype| features.kernel(dtype));
        assert_eq!(chosen, expected, "{features:?}");
        assert!(features.kernel(DType::F16).is_none());
    }
}

#[test]
fn every_layout_and_size_gives_the_product() {
    for kernel in kernels() {
        for (m, n, k) in [
            (1, 1, 1),
            (13, 32, 16),
            (14, 33, 17),
            (5, 70, 3),
            (40, 31, 260),
            (64, 64, 64),
            (801, 33, 40),
            (70, 100, 900),
            (270, 530, 290),
        ] {
            let (a, b) = (random(m, k, kernel, 1), random(k, n, kernel, 2));
            let wide = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double));
            let (a_t, b_t) = (a.transpose(0, 1).contiguous(), b.transpose(0, 1).contiguous());
            for left in [rows_of(&a), columns_of(&a_t)] {
                for right in [columns_of(&b), rows_of(&b_t)] {
                    let out = blank(m * n, kernel);
                    let mut product = Product::plain(view_mut(&out), [m, n, k], n, Outcome::General);
                    multiply(kernel, [left, right], &mut product, false);
                    let error = relative(&out.view_as(&wide), &wide);
                    assert!(error < tolerance(kernel), "{kernel:?} {m}x{n}x{k}: {error}");
                }
            }
        }
    }
}

#[test]
#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
fn amx_is_found_by_a_small_product() {
    // A processor with AMX loads a configuration without the permission that what follows needs: emulation would miss it.
    let is_usable = Features::detect(DType::BF16).amx_bf16;
    if is_usable || (std::is_x86_feature_detected!("avx512bf16") && can_be_emulated()) {
        assert!(super::amx::multiplies());
    }
}

#[test]
fn sums_and_factors_apply_once_and_only_the_part_is_written() {
    for kernel in kernels() {
        let (a, b) = (random(20, 9, kernel, 1), random(9, 35, kernel, 2));
        let (out, one, two) =
            (random(20, 50, kernel, 3), random(20, 50, kernel, 4), random(20, 50, kernel, 5));
        // Columns 7 to 42 of matrices with 50.
        let part = |x: &Tensor| x.narrow(1, 7, 35).to_kind(Kind::Double);
        let flat = |x| view(x).part(7, 19 * 50 + 35).into();
        let d = |x: &Tensor| x.to_kind(Kind::Double);
        let sum = d(&a).matmul(&d(&b)) * 0.5 + part(&out) * -2.0 + part(&one) * 3.0 + part(&two) * 0.25;
        let before = out.copy();
        let mut product = Product {
            out: view_mut(&out).into_part(7, 19 * 50 + 35).into(),
            size: [20, 35, 9],
            stride: 50,
            factor: 0.5,
            keep: -2.0,
            add: &[(3.0, flat(&one)), (0.25, flat(&two))],
            diagonal: 0.0,
            outcome: Outcome::General,
        };
        multiply(kernel, [rows_of(&a), columns_of(&b)], &mut product, false);
        assert!(relative(&out.narrow(1, 7, 35), &sum) < tolerance(kernel), "{kernel:?}");
        for (first, count) in [(0, 7), (42, 8)] {
            assert!(out.narrow(1, first, count).equal(&before.narrow(1, first, count)), "{kernel:?}");
        }
    }
}

#[test]
fn exactly_symmetric_product_is_equal_on_any_thread_count() {
    for kernel in kernels() {
        for (size, inner) in
            [(1, 29), (12, 29), (13, 29), (32, 29), (33, 29), (100, 29), (417, 29), (290, 600)]
        {
            let x = random(size, inner, kernel, 7);
            let wide = x.to_kind(Kind::Double);
            let wide = wide.matmul(&wide.transpose(0, 1));
            let run = |spread: bool| {
                let out = blank(size * size, kernel);
                let mut product =
                    Product::plain(view_mut(&out), [size, size, inner], size, Outcome::Symmetric);
                let operands = [rows_of(&x); 2];
                crate::threads::set(if spread { 3 } else { 1 });
                multiply(kernel, operands, &mut product, spread);
                crate::threads::set(1);
                out.view_as(&wide)
            };
            let out = run(false);
            assert!(out.equal(&out.transpose(0, 1)), "{kernel:?} {size} {inner}");
            assert!(relative(&out, &wide) < tolerance(kernel), "{kernel:?} {size} {inner}");
            assert!(out.equal(&run(true)), "{kernel:?} {size} {inner}");
        }
    }
}

#[test]
fn the_diagonal_is_shifted_before_anything_is_rounded() {
    for kernel in kernels() {
        for size in [1, 12, 13, 31, 33, 100, 417] {
            let (x, one) = (random(size, 29, kernel, 7), random(size, 29, kernel, 8));
            let d = |x: &Tensor| x.to_kind(Kind::Double);
            let square = |x: &Tensor| d(x).matmul(&d(x).transpose(0, 1));
            let one = square(&one).to_kind(kernel.dtype().kind());
            let eye = Tensor::eye(i64::try_from(size).unwrap(), (Kind::Double, Device::Cpu));
            // Elements of the diagonal are small then: what is left is of the size of the others.
            let wide = square(&x) * 0.5 + d(&one) * 2.0 - &eye * 72.5;
            let out = blank(size * size, kernel);
            let mut product = Product {
                factor: 0.5,
                add: &[(2.0, view(&one).into())],
                diagonal: -72.5,
                ..Product::plain(view_mut(&out), [size, size, 29], size, Outcome::Symmetric)
            };
            multiply(kernel, [rows_of(&x); 2], &mut product, false);
            let mut plain = Product { outcome: Outcome::General, ..product };
            let panels = [Side::Left, Side::Right].map(|side| blank(kernel.elements(side, size, 29), kernel));
            let [left, right] = panels.each_ref().map(view);
            assert!(kernel.multiply(&left, &right, &mut plain, false).is_err(), "only symmetric products");
            let out = out.view_as(&wide);
            assert!(out.equal(&out.transpose(0, 1)), "{kernel:?} {size}");
            // Of bfloat16 only what is left is rounded to it.
            let sums = if kernel.dtype() == DType::F64 { 1e-13 } else { 1e-4 };
            let bound = wide.abs() * tolerance(kernel) + sums;
            let beyond = ((d(&out) - &wide).abs() - bound).max().double_value(&[]);
            assert!(beyond <= 0.0, "{kernel:?} {size}: {beyond}");
        }
    }
}

#[test]
fn what_is_usual_on_the_diagonal_is_known_before_the_product() {
    let kernel = Kernel::Bf16Avx2;
    for size in [1_usize, 5, 32, 100] {
        for rows_are_columns in [false, true] {
            let mut x = random(size, 40, kernel, 3);
            // One of those that are looked at.
            let _ = x.get(i64::try_from(size / 4).unwrap()).fill_(1e3);
            let x_t = x.transpose(0, 1).contiguous();
            let from = if rows_are_columns { columns_of(&x_t) } else { rows_of(&x) };
            let out = blank(size * size, kernel);
            let add = random(size, size, kernel, 4);
            let product = Product {
                factor: 0.5,
                add: &[(-2.0, view(&add).into())],
                diagonal: 3.0,
                ..Product::plain(view_mut(&out), [size, size, 40], size, Outcome::Symmetric)
            };
            let usual = product.usual_diagonal([&from; 2]);
            let d = |x: &Tensor| x.to_kind(Kind::Double);
            let whole = (d(&x) * d(&x)).sum_dim_intlist([1].as_slice(), false, Kind::Double) * 0.5
                - d(&add).diagonal(0, 0, 1) * 2.0
                + 3.0;
            if size >= 32 {
                // A row that is unlike the others does not count.
                let middle = whole.median().double_value(&[]);
                assert!((usual - middle).abs() < 8.0, "{size}: {usual} {middle}");
            } else if size == 1 {
                assert!((usual / whole.double_value(&[0]) - 1.0).abs() < 4e-3, "{usual} {whole}");
            }
            let rounded = half::bf16::from_f64(usual).to_f64();
            assert!(rounded.to_bits() == usual.to_bits(), "a number of its type");
            let _ = x.fill_(f64::NAN);
            assert!(product.usual_diagonal([&rows_of(&x); 2]) == 0.0);
        }
    }
    let x = random(40, 40, Kernel::F32Avx2, 3);
    let product = Product { diagonal: 3.0, ..Product::plain(view_mut(&x), [40; 3], 40, Outcome::Symmetric) };
    assert!(product.usual_diagonal([&rows_of(&x); 2]) == 0.0, "wider types have the digits");
}

#[test]
fn nan_and_infinity_stay_what_they_are_in_bfloat16() {
    for kernel in kernels() {
        let x = random(3, 4, kernel, 1);
        let _ = x.get(1).get(2).fill_(f64::NAN);
        let out = blank(9, kernel);
        let mut product = Product::plain(view_mut(&out), [3, 3, 4], 3, Outcome::Symmetric);
        multiply(kernel, [rows_of(&x); 2], &mut product, false);
        assert_eq!(out.isnan().to_kind(Kind::Int64).sum(Kind::Int64).int64_value(&[]), 5, "{kernel:?}");
    }
}

#[test]
fn memory_that_is_too_short_is_refused() {
    for kernel in kernels() {
        let x = random(20, 40, kernel, 1);
        let short = blank(kernel.elements(Side::Left, 20, 40) - 1, kernel);
        assert!(kernel.pack(Side::Left, &rows_of(&x), &mut view_mut(&short), false).is_err());
        let beyond = Operand { count: 21, ..rows_of(&x) };
        let panels = blank(kernel.elements(Side::Left, 21, 40), kernel);
        assert!(kernel.pack(Side::Left, &beyond, &mut view_mut(&panels), false).is_err());
    }
}

#[test]
fn transposed_thin_product_is_in_place_on_any_thread_count() {
    for kernel in kernels() {
        for (rows, cols, inner, gap) in [(40, 7, 9, 0), (700, 48, 600, 3), (1300, 24, 400, 0), (33, 3, 1, 5)]
        {
            let (large, thin) = (random(inner, rows, kernel, 1), random(inner, cols, kernel, 2));
            let size_of = |x: &Tensor| [0, 1].map(|d| usize::try_from(x.size()[d]).unwrap());
            let whole = |x| view(x).matrix(0, size_of(x), size_of(x)[1]);
            let wide = large.to_kind(Kind::Double).tr().matmul(&thin.to_kind(Kind::Double));
            let size = i64::try_from(cols).unwrap();
            let results: Vec<_> = [1, 3]
                .into_iter()
                .map(|threads| {
                    crate::threads::set(threads);
                    let out = random(rows, cols + gap, kernel, 3);
                    let before = out.copy();
                    let product = |keep| ThinProduct {
                        out: view_mut(&out).into_matrix(0, [rows, cols], cols + gap),
                        left: (whole(&large), true),
                        right: (whole(&thin), false),
                        keep,
                    };
                    kernel.thin_products(&mut [product(0.0)]).unwrap();
                    assert!(kernel.thin_products(&mut [product(1.0)]).is_err());
                    let rest = i64::try_from(gap).unwrap();
                    assert!(out.narrow(1, size, rest).equal(&before.narrow(1, size, rest)));
                    out.narrow(1, 0, size).contiguous()
                })
                .collect();
            crate::threads::set(1);
            let error = relative(&results[0], &wide);
            assert!(error < 3.0 * tolerance(kernel), "{kernel:?} {rows}x{cols} {inner}: {error}");
            assert!(results[0].equal(&results[1]), "{kernel:?} {rows}x{cols} {inner}");
        }
    }
}

#[test]
fn thin_product_or_transpose_is_added_on_any_thread_count() {
    for kernel in kernels() {
        for (rows, cols, inner, keep) in
            [(40, 7, 9, 0.0), (700, 48, 600, 0.5), (300, 530, 24, 1.0), (1, 3, 1, 0.0)]
        {
            for transposed in [false, true] {
                let left = random(rows, inner, kernel, 1);
                let (right, old) = (random(inner, cols, kernel, 2), random(rows, cols, kernel, 3));
                let stored = if transposed { right.tr().contiguous() } else { right.copy() };
                let wide = |x: &Tensor| x.to_kind(Kind::Double);
                let expected = wide(&left).matmul(&wide(&right)) + wide(&old) * keep;
                let size_of = |x: &Tensor| [0, 1].map(|d| usize::try_from(x.size()[d]).unwrap());
                let whole = |x| view(x).matrix(0, size_of(x), size_of(x)[1]);
                let results = [1, 3].map(|threads| {
                    crate::threads::set(threads);
                    let out = old.copy();
                    let right = (whole(&stored), transposed);
                    let to = view_mut(&out).into_matrix(0, [rows, cols], cols);
                    let product = ThinProduct { out: to, left: (whole(&left), false), right, keep };
                    kernel.thin_products(&mut [product]).unwrap();
                    out
                });
                crate::threads::set(1);
                let error = relative(&results[0], &expected);
                assert!(error < 3.0 * tolerance(kernel), "{kernel:?} {rows}x{cols} {inner}: {error}");
                assert!(results[0].equal(&results[1]), "{kernel:?} {rows}x{cols} {inner}");
            }
        }
    }
}

/// `cargo test --release --lib rate_of_products -- --ignored --nocapture`: packed products and libtorch's, in turn, on one
/// thread. With AMX ours have to reach 0.9 of the rate.
#[test]
#[ignore = "a measurement, for a quiet machine"]
#[allow(clippy::cast_precision_loss, clippy::print_stdout)]
fn rate_of_products_and_of_the_library() {
    let Some(kernel) = Kernel::of(DType::BF16) else { return };
    tch::set_num_threads(1);
    for n in [1024_usize, 2048, 4096] {
        let (a, b) = (random(n, n, kernel, 1), random(n, n, kernel, 2));
        let [left, right, out] = [Side::Left, Side::Right, Side::Left]
            .map(|side| blank(kernel.elements(side, n, n).max(n * n), kernel));
        let run = || {
            let product = &mut Product::plain(view_mut(&out), [n; 3], n, Outcome::General);
            let panels = [&mut view_mut(&left), &mut view_mut(&right)];
            kernel.pack(Side::Left, &rows_of(&a), panels[0], false).unwrap();
            kernel.pack(Side::Right, &columns_of(&b), panels[1], false).unwrap();
            kernel.multiply(&panels[0].view(), &panels[1].view(), product, false).unwrap();
        };
        let library = || {
            let _ = a.matmul(&b);
        };
        let seconds = |work: &dyn Fn()| {
            let begun = std::time::Instant::now();
            work();
            begun.elapsed().as_secs_f64()
        };
        let mut rounds: Vec<[f64; 2]> = (0..9).map(|_| [seconds(&run), seconds(&library)]).collect();
        let rate = |seconds: f64| 2e-9 * (n as f64).powi(3) / seconds;
        let mut ratios: Vec<f64> = rounds.iter().map(|[ours, theirs]| theirs / ours).collect();
        ratios.sort_by(f64::total_cmp);
        let medians = [0, 1].map(|which| {
            rounds.sort_by(|a, b| a[which].total_cmp(&b[which]));
            rate(rounds[4][which])
        });
        println!(
            "{kernel:?} {n}: {:.0} GFLOP/s, libtorch {:.0}, ratio {:.2}",
            medians[0], medians[1], ratios[4]
        );
        assert!(kernel != Kernel::Bf16Amx || ratios[4] >= 0.9, "{n}: {}", ratios[4]);
    }
}
