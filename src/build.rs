//! The library that the core is linked against in place of libtorch, and the machine code of CUDA kernels that is shipped with it.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=src/build.rs");
    list_machine_code();
    link_shim();
    copy_torch_files();
}

/// Copies the folder `OXIDION_TORCH_FILES`, which the build of a wheel fills, to where maturin takes it from.
fn copy_torch_files() {
    println!("cargo:rerun-if-env-changed=OXIDION_TORCH_FILES");
    let to = Path::new(&std::env::var_os("OUT_DIR").unwrap_or_default()).join("_torch");
    let _ = std::fs::remove_dir_all(&to);
    if let Some(from) = std::env::var_os("OXIDION_TORCH_FILES") {
        println!("cargo:rerun-if-changed={}", from.display());
        copy_folder(Path::new(&from), &to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }
}

fn copy_folder(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Links a stub of `liboxidion_torch.so`: empty functions under the names that the shim has. The shim itself, which is
/// made for one minor version of torch, is open when Python opens the extension; tests find it by `LD_LIBRARY_PATH`.
fn link_shim() {
    let sources = ["src/torch_names.txt", "tests/rust/torch_names.txt", "src/torch_shim.cpp"].map(|file| {
        println!("cargo:rerun-if-changed={file}");
        std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{file}: {error}"))
    });
    let [names, names_of_tests, own] = &sources;
    println!("cargo:rustc-env=OXIDION_SHIM_ABI={:016x}", fnv1a(&[names, own]));

    let mut code = String::new();
    for name in [names, names_of_tests].into_iter().flat_map(|list| list.lines()) {
        if !name.is_empty() && !name.starts_with('#') {
            let _ = writeln!(code, "void {name}(void) {{}}");
        }
    }
    let out = std::env::var_os("OUT_DIR").unwrap_or_default();
    let (source, stub) = (Path::new(&out).join("stub.c"), Path::new(&out).join("liboxidion_torch.so"));
    std::fs::write(&source, code).unwrap_or_else(|error| panic!("{}: {error}", source.display()));
    let mut command = cc::Build::new().cargo_metadata(false).get_compiler().to_command();
    command.args(["-w", "-shared", "-fPIC", "-nostdlib", "-o"]).arg(&stub).arg(&source);
    let macos = std::env::var_os("CARGO_CFG_TARGET_OS").is_some_and(|os| os == "macos");
    command.arg(if macos {
        "-Wl,-install_name,@rpath/liboxidion_torch.so"
    } else {
        "-Wl,-soname,liboxidion_torch.so"
    });
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
    if macos {
        // Functions that nothing calls are looked up when they are called, as Linux does.
        println!("cargo:rustc-link-arg=-Wl,-undefined,dynamic_lookup");
    }
    // By its path: the folder of a library that is searched would come before the shim's when tests run.
    println!("cargo:rustc-link-arg={}", stub.display());
}

/// The 64-bit FNV-1a hash of texts, as `python/build_shim.py` takes it.
fn fnv1a(texts: &[&String]) -> u64 {
    let bytes = texts.iter().flat_map(|text| text.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Writes the list of the files `KEY.cubin` in the folder `OXIDION_CUBINS`, which `make wheel` fills; an empty one without.
fn list_machine_code() {
    println!("cargo:rerun-if-env-changed=OXIDION_CUBINS");
    let mut list = String::from("&[");
    if let Some(folder) = std::env::var_os("OXIDION_CUBINS") {
        println!("cargo:rerun-if-changed={}", folder.display());
        let mut files: Vec<_> = std::fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("OXIDION_CUBINS={}: {error}", folder.display()))
            .filter_map(|entry| entry.ok()?.path().canonicalize().ok())
            .filter(|file| file.extension() == Some(OsStr::new("cubin")))
            .collect();
        files.sort();
        for file in files {
            let key = file.file_stem().unwrap_or_default().display().to_string();
            let _ = write!(list, "({key:?}, include_bytes!({:?}) as &[u8]),", file.display().to_string());
        }
    }
    list.push(']');
    let out = std::env::var_os("OUT_DIR").unwrap_or_default();
    if let Err(error) = std::fs::write(Path::new(&out).join("cubins.rs"), list) {
        panic!("the list of machine code: {error}");
    }
}
