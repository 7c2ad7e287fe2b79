use std::any::Any;

use tch::{Device, Kind as Element};

use super::*;
use crate::spec::OptionValue;

fn options(entries: &[(&str, OptionValue)]) -> Options {
    let mut options = Options::of_tests();
    for (key, value) in entries {
        options.insert(key, value.clone());
    }
    options
}

fn word(x: &str) -> OptionValue {
    OptionValue::Str(x.to_owned())
}

fn random(shape: &[i64]) -> Tensor {
    tch::manual_seed(3);
    Tensor::randn(shape, (Element::Double, Device::Cpu))
}

fn run(orthonormalizer: &Orthonormalizer, x: &Tensor) -> Result<Tensor> {
    let (_, m, n) = x.size3()?;
    let side = |n: i64| usize::try_from(n).unwrap();
    let dtype = DType::from_kind(x.kind()).unwrap();
    let scratch = orthonormalizer.scratch_elements(side(m), side(n), dtype, false)?;
    let mut scratch = Tensor::full([i64::try_from(scratch).unwrap()], f64::NAN, (x.kind(), Device::Cpu));
    let mut out = x.copy();
    orthonormalizer.run(&mut out, 1e-8, &mut scratch).map(|()| out)
}

fn relative(a: &Tensor, b: &Tensor) -> f64 {
    ((a.to_kind(Element::Double) - b).norm() / b.norm()).double_value(&[])
}

#[test]
fn options_choose_the_method() {
    let built = |entries: &[(&str, OptionValue)]| {
        Orthonormalizer::from_options(&options(entries)).map(|o| format!("{:?}", o.kind))
    };
    let iteration = |p: &str, form: &str| format!("Iteration {{ polynomial: {p}, form: {form} }}");
    assert_eq!(built(&[]).unwrap(), iteration("polar_express", "Auto"));
    let schulz = ("use_polar_express", OptionValue::Bool(false));
    assert_eq!(built(std::slice::from_ref(&schulz)).unwrap(), iteration("newton_schulz", "Auto"));
    let cans = ("ns_coefficients", word("cans"));
    let gram = ("orth_method", word("gram"));
    assert_eq!(built(&[schulz.clone(), cans, gram.clone()]).unwrap(), iteration("cans", "Gram"));
    let rows = ("ns_coefficients", OptionValue::Rows(vec![vec![1.5, -0.5, 0.0]]));
    let two = ("ns_steps", OptionValue::Int(2));
    let expected = iteration("custom[[1.5, -0.5, 0.0], [1.5, -0.5, 0.0]]", "Standard");
    let standard = ("orth_method", word("standard"));
    assert_eq!(built(&[rows, two.clone(), standard.clone()]).unwrap(), expected);
    for (one, shown) in [
        (OptionValue::Floats(vec![1.5, -0.5, 0.0]), "[1.5, -0.5, 0.0]"),
        (OptionValue::Ints(vec![2, -1, 0]), "[2.0, -1.0, 0.0]"),
    ] {
        let one = ("ns_coefficients", one);
        let expected = |steps| iteration(&format!("custom[{}]", vec![shown; steps].join(", ")), "Standard");
        assert_eq!(built(&[one.clone(), standard.clone()]).unwrap(), expected(5));
        assert_eq!(built(&[one.clone(), two.clone(), standard.clone()]).unwrap(), expected(2));
        assert_eq!(built(&[one, ("ns_steps", OptionValue::Int(7)), standard.clone()]).unwrap(), expected(7));
    }
    assert_eq!(built(&[("orth_method", word("svd"))]).unwrap(), "Polar");

    for (bad, says) in [
        (("orth_method", word("qr")), "orth_method must be one of"),
        (("ns_coefficients", word("jordan")), "ns_coefficients must be one of"),
        (("ns_coefficients", OptionValue::Rows(vec![vec![1.0, 2.0]])), "triples"),
        (("ns_coefficients", OptionValue::Ints(vec![])), "1 to 32 triples"),
        (("ns_coefficients", OptionValue::Floats(vec![1.0, 2.5])), "triples"),
        (("ns_coefficients", OptionValue::Floats(vec![1.0, f64::NAN, 0.0])), "finite"),
        (("ns_steps", OptionValue::Int(0)), "ns_steps must be"),
        (("orth_preset", word("quick")), "orth_preset must be 'exact' or 'fast'"),
        (("newton_schulz_func", word("f")), "newton_schulz_func must be callable"),
    ] {
        let message = built(&[bad]).unwrap_err().to_string();
        assert!(message.contains(says), "{message}");
    }
    let fast = ("orth_preset", word("fast"));
    assert!(built(std::slice::from_ref(&fast)).unwrap().contains("polar_express_fast"));
    for (other, says) in [
        (("ns_coefficients", word("cans")), "coefficients of its own"),
        (("use_polar_express", OptionValue::Bool(false)), "coefficients of its own"),
        (("orth_method", word("svd")), "is a polynomial"),
    ] {
        assert!(built(&[fast.clone(), other]).unwrap_err().to_string().contains(says));
    }
    let negative = ("ns_coefficients", OptionValue::Rows(vec![vec![-1.0, 1.0, 0.0]]));
    assert!(built(std::slice::from_ref(&negative)).is_ok());
    assert!(built(&[negative, gram]).unwrap_err().to_string().contains("a > 0"));
}

#[test]
fn auto_takes_the_gram_form_for_long_matrices() {
    let of = |form| Orthonormalizer::iteration(POLAR_EXPRESS, form).unwrap();
    let [auto, standard, gram] = [Form::Auto, Form::Standard, Form::Gram].map(of);
    // k = 1024, n = 4096: five steps of (4 n + 2 k) k²; one, two or three starts of 4 n k² with five squares and three
    // products more for each of the five steps that is no start.
    let (short, k) = (1024_usize, 1024_u128);
    assert_eq!(standard.flops(short, 4 * short, DType::F32), 5 * k * k * (16 * k + 2 * k));
    assert_eq!(gram.flops(4 * short, short, DType::F64), k * k * (16 * k + 2 * (5 + 3 * 4) * k));
    assert_eq!(gram.flops(4 * short, short, DType::F32), k * k * (2 * 16 * k + 2 * (5 + 3 * 3) * k));
    assert_eq!(gram.flops(4 * short, short, DType::BF16), k * k * (3 * 16 * k + 2 * (5 + 3 * 2) * k));
    for (rows, cols, dtype, expected) in [
        (1024, 4096, DType::F32, &gram),
        (4096, 1024, DType::F64, &gram),
        (1024, 4096, DType::BF16, &gram),
        (1024, 1536, DType::BF16, &gram),
        (1024, 2048, DType::F32, &gram),
        (1024, 1280, DType::F32, &standard),
        (1024, 1024, DType::F32, &standard),
        (64, 4096, DType::F32, &gram),
        (48, 4096, DType::F32, &standard),
        (64, 4096, DType::BF16, &standard),
    ] {
        assert_eq!(auto.flops(rows, cols, dtype), expected.flops(rows, cols, dtype), "{rows}x{cols}");
        let elements = |o: &Orthonormalizer| o.scratch_elements(rows, cols, dtype, false).unwrap();
        assert_eq!(elements(&auto), elements(expected), "{rows}x{cols}");
    }
}

#[test]
fn devices_multiply_in_float16_unless_a_dtype_is_set() {
    let of = |on_device: bool, name: &str, method: &str| {
        let mut options = options(&[("orth_dtype", word(name)), ("orth_method", word(method))]);
        (options.on_device, options.matrix_units) = (on_device, on_device);
        Orthonormalizer::from_options(&options).unwrap()
    };
    let forms = |o: &Orthonormalizer, cols: usize| o.gram_restarts(1024, cols, o.product(DType::BF16));
    for (on_device, name, dtype) in [
        (true, "auto", DType::F16),
        (true, "bfloat16", DType::BF16),
        (true, "float16", DType::F16),
        (false, "auto", DType::BF16),
        (false, "float16", DType::F16),
    ] {
        let made = of(on_device, name, "auto");
        assert_eq!(made.product(DType::BF16), dtype, "{on_device} {name}");
        assert_eq!(made.given(DType::F16), DType::BF16);
        for dtype in [DType::F16, DType::F32, DType::F64] {
            assert_eq!(made.product(dtype), dtype);
        }
    }
    let aol = |name: &str| {
        let mut options = options(&[("orth_dtype", word(name)), ("ns_coefficients", word("aol"))]);
        (options.on_device, options.matrix_units) = (true, true);
        Orthonormalizer::from_options(&options)
    };
    assert_eq!(aol("auto").unwrap().product(DType::BF16), DType::BF16);
    assert!(aol("float16").unwrap_err().to_string().contains("float16 cannot hold"));
    // The Gram form from 1.5 times as many columns on, with one restart; in bfloat16 only where it is asked for.
    let auto = of(true, "auto", "auto");
    assert_eq!(forms(&auto, 1536), Some(vec![2]));
    assert_eq!(forms(&auto, 1500), None);
    assert_eq!(forms(&of(true, "bfloat16", "auto"), 4096), None);
    assert_eq!(forms(&of(true, "bfloat16", "gram"), 4096), Some(vec![1, 3]));
    assert_eq!(forms(&of(false, "float16", "auto"), 1400), Some(vec![2]));
}

#[test]
fn matrices_in_bfloat16_are_multiplied_in_float16() {
    for method in ["standard", "gram"] {
        let of = |name| {
            let entries = [("orth_dtype", word(name)), ("orth_method", word(method))];
            Orthonormalizer::from_options(&options(&entries)).unwrap()
        };
        for (b, m, n, scale) in [(3, 40, 90, 1e-5), (3, 90, 40, 1e30), (1, 300, 500, 1.0), (2, 6, 5, 1.0)] {
            let x = (random(&[b, m, n]) * scale).to_kind(Element::BFloat16);
            let exact = run(&of("float64"), &x.to_kind(Element::Double)).unwrap();
            let [narrow, out] = ["bfloat16", "float16"].map(|name| run(&of(name), &x).unwrap());
            assert_eq!(out.kind(), Element::BFloat16);
            let [rounded, found] = [&narrow, &out].map(|x| relative(x, &exact));
            let most = if method == "gram" { 0.05 } else { rounded };
            assert!(found < most, "{method} {m}x{n}: {found}, in bfloat16 {rounded}");
        }
    }
}

#[test]
fn every_form_gives_the_same_matrix() {
    // 256 x 700 is computed in the Gram form by "auto".
    for (b, m, n) in [(1, 256, 700), (1, 700, 256), (3, 7, 12), (2, 1, 9)] {
        let x = random(&[b, m, n]);
        let reference = run(&Orthonormalizer::iteration(NEWTON_SCHULZ, Form::Standard).unwrap(), &x).unwrap();
        for form in [Form::Auto, Form::Gram] {
            let out = run(&Orthonormalizer::iteration(NEWTON_SCHULZ, form).unwrap(), &x).unwrap();
            assert!(relative(&out, &reference) < 1e-11, "{form:?} {m}x{n}");
        }
    }
}

#[test]
fn polar_factor_is_exact_for_any_scale_and_rank() {
    let polar = Orthonormalizer { kind: Kind::Polar, float16: false, on_device: false };
    for (kind, tolerance) in [(Element::Double, 1e-13), (Element::Float, 1e-5), (Element::BFloat16, 1e-2)] {
        // Q of a QR times a symmetric positive matrix has Q as its polar factor.
        let q = Tensor::linalg_qr(&random(&[2, 12, 5]), "reduced").0;
        let half = random(&[2, 5, 5]);
        let positive = half.matmul(&half.transpose(1, 2)) + Tensor::eye(5, (Element::Double, Device::Cpu));
        let x = q.matmul(&positive);
        for scale in [1e-30, 1.0, 1e30] {
            let out = run(&polar, &(&x * scale).to_kind(kind)).unwrap();
            assert!(relative(&out, &q) < 4.0 * tolerance, "{kind:?} {scale:e}: {}", relative(&out, &q));
        }
    }
    // u vᵀ of rank 1 has the partial isometry u vᵀ / (|u| |v|); zero and non-finite matrices keep to themselves.
    let (u, v) = (random(&[1, 6, 1]), random(&[1, 1, 4]));
    let one = u.matmul(&v);
    let bad = one.copy();
    let _ = bad.get(0).get(1).get(1).fill_(f64::INFINITY);
    let batch = Tensor::cat(&[&one, &one.zeros_like(), &bad], 0);
    let out = run(&polar, &batch).unwrap();
    assert!(relative(&out.get(0), &(&one / (u.norm() * v.norm())).get(0)) < 1e-14);
    assert_eq!(out.get(1).count_nonzero(None).int64_value(&[]), 0);
    assert_eq!(out.get(2).isnan().all().int64_value(&[]), 1);
}

#[test]
fn function_of_the_user_goes_first_and_is_checked() {
    fn with(function: Function) -> Orthonormalizer {
        let callback = Callback::new("module.function".to_owned(), 7, function);
        let entries = [("newton_schulz_func", OptionValue::Callback(callback)), ("orth_method", word("svd"))];
        Orthonormalizer::from_options(&options(&entries)).unwrap()
    }
    let x = random(&[2, 3, 4]);
    let scaled = with(Box::new(|x, epsilon| Ok(x * (2.0 + epsilon))));
    assert!(relative(&run(&scaled, &x).unwrap(), &(&x * 2.0)) < 1e-8);
    assert_eq!(format!("{:?}", scaled.kind), "Function(module.function)");
    let wider = with(Box::new(|x, _| Ok(x.to_kind(Element::Float))));
    assert_eq!(run(&wider, &x).unwrap().kind(), Element::Double);
    let narrow = with(Box::new(|x, _| Ok(x.narrow(2, 0, 3))));
    assert!(matches!(run(&narrow, &x), Err(Error::Value(_))));
    let whole = with(Box::new(|x, _| Ok(x.to_kind(Element::Int64))));
    assert!(matches!(run(&whole, &x), Err(Error::Type(_))));
    let kept = x.copy();
    let in_place = with(Box::new(|x, _| {
        let _ = x.shallow_clone().f_zero_()?;
        Err(Error::Value("no".to_owned()))
    }));
    assert!(run(&in_place, &x).is_err() && x.equal(&kept));
    let strange: Box<dyn Any + Send + Sync> = Box::new(3_u8);
    let callback = Callback::new("x".to_owned(), 1, strange);
    assert!(callback.get::<Function>().is_none());
}
