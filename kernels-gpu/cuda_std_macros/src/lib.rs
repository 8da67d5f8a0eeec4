//! The `#[kernel]` attribute of `cuda_std`.

use proc_macro::TokenStream;
use proc_macro2::TokenStream as Tokens;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::{Error, Expr, FnArg, Ident, ItemFn, ReturnType, Token, Visibility};

/// Makes a function an entry point of the PTX module.
///
/// ```text
/// /// # Safety
/// /// ...
/// #[kernel(max_threads = 256, min_blocks_per_sm = 2, barriers = 6)]
/// pub unsafe fn column_sums(params: ColumnSumsParams) { .. }
/// ```
///
/// * `max_threads`: threads of the largest block that is ever launched, a multiple of 32 up to 1024 (`.maxntid`)
/// * `min_blocks_per_sm`: blocks that must fit on one SM at a time, which caps the registers of a thread (`.minnctapersm`)
/// * `barriers`: block-wide barrier instructions that the entry has in PTX. `asm!` is not convergent for LLVM and a copied barrier hangs,
///   so `cuda_builder` compares this number with the PTX.
/// * `cluster_size`: blocks of a cluster, up to 8 (`.reqnctapercluster`); left out: none, as with 1
///
/// Each is a constant expression of any integer type. The function is `pub`, `unsafe`, not generic, returns nothing and takes exactly one
/// parameter, by value (`repr(C)`, at most 4096 bytes). rustc has no attribute for launch bounds: the body starts with a PTX comment that
/// carries the numbers, and `cuda_builder` makes directives of it. On a host the function is dropped.
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let bounds = syn::parse_macro_input!(attribute as LaunchBounds);
    let function = syn::parse_macro_input!(item as ItemFn);
    expand(&bounds, &function).unwrap_or_else(Error::into_compile_error).into()
}

/// The arguments of the attribute.
struct LaunchBounds {
    max_threads: Expr,
    min_blocks_per_sm: Expr,
    barriers: Expr,
    cluster_size: Expr,
}

impl Parse for LaunchBounds {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        const NAMES: [&str; 4] = ["max_threads", "min_blocks_per_sm", "barriers", "cluster_size"];
        let mut values: [Option<Expr>; 4] = [None, None, None, Some(syn::parse_quote!(1))];
        let mut given = [false; 4];
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            let Some(index) = NAMES.iter().position(|known| name == known) else {
                return Err(Error::new(name.span(), format!("unknown argument; expected {}", NAMES.join(", "))));
            };
            input.parse::<Token![=]>()?;
            values[index] = Some(input.parse()?);
            if std::mem::replace(&mut given[index], true) {
                return Err(Error::new(name.span(), format!("`{name}` is given twice")));
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        let missing: Vec<_> =
            NAMES.iter().zip(&values).filter(|(_, value)| value.is_none()).map(|(name, _)| *name).collect();
        let [Some(max_threads), Some(min_blocks_per_sm), Some(barriers), Some(cluster_size)] = values else {
            return Err(input.error(format!("missing: {}", missing.join(", "))));
        };
        Ok(LaunchBounds { max_threads, min_blocks_per_sm, barriers, cluster_size })
    }
}

/// The entry point, or the rule that `function` breaks.
fn expand(bounds: &LaunchBounds, function: &ItemFn) -> syn::Result<Tokens> {
    let ItemFn { attrs, vis, sig, block } = function;
    let refuse = |span: &dyn quote::ToTokens, rule: &str| Err(Error::new_spanned(span, rule));
    if !matches!(vis, Visibility::Public(_)) {
        return refuse(sig, "a kernel is `pub`");
    }
    if sig.unsafety.is_none() {
        return refuse(sig, "a kernel is an `unsafe fn`: the host must pass valid device pointers");
    }
    if sig.abi.is_some() || sig.constness.is_some() || sig.asyncness.is_some() {
        return refuse(sig, "a kernel is a plain `unsafe fn`; the attribute adds the ABI");
    }
    if !sig.generics.params.is_empty() || sig.generics.where_clause.is_some() {
        return refuse(&sig.generics, "a kernel is not generic: it needs one name in the PTX module");
    }
    if !matches!(sig.output, ReturnType::Default) {
        return refuse(&sig.output, "a kernel returns nothing");
    }
    let mut inputs = sig.inputs.iter();
    let (Some(FnArg::Typed(parameter)), None) = (inputs.next(), inputs.next()) else {
        return refuse(&sig.ident, "a kernel takes exactly one parameter: a `repr(C)` struct, by value");
    };
    let parameter_type = &parameter.ty;
    if matches!(**parameter_type, syn::Type::Reference(_)) {
        return refuse(parameter_type, "a kernel takes its parameter by value");
    }
    let LaunchBounds { max_threads, min_blocks_per_sm, barriers, cluster_size } = bounds;
    let (name, inputs, statements) = (&sig.ident, &sig.inputs, &block.stmts);
    Ok(quote! {
        #[cfg(target_arch = "nvptx64")]
        #(#attrs)*
        #[unsafe(no_mangle)]
        #vis unsafe extern "ptx-kernel" fn #name(#inputs) {
            const MAX_THREADS: u32 = (#max_threads) as u32;
            const MIN_BLOCKS_PER_SM: u32 = (#min_blocks_per_sm) as u32;
            const BARRIERS: u32 = (#barriers) as u32;
            const CLUSTER_SIZE: u32 = (#cluster_size) as u32;
            const _: () = {
                ::core::assert!(MAX_THREADS % 32 == 0 && 0 < MAX_THREADS && MAX_THREADS <= 1024, "max_threads: 32, 64, .. 1024");
                ::core::assert!(0 < MIN_BLOCKS_PER_SM && MIN_BLOCKS_PER_SM <= 32, "min_blocks_per_sm: 1..=32");
                ::core::assert!(0 < CLUSTER_SIZE && CLUSTER_SIZE <= 8, "cluster_size: 1..=8");
                ::core::assert!(::core::mem::size_of::<#parameter_type>() <= 4096, "the parameter is larger than 4096 bytes");
            };
            // SAFETY: emits a comment.
            unsafe {
                ::core::arch::asm!(
                    "// kernel max_threads={} min_blocks_per_sm={} barriers={} cluster_size={}",
                    const MAX_THREADS,
                    const MIN_BLOCKS_PER_SM,
                    const BARRIERS,
                    const CLUSTER_SIZE,
                    options(nomem, nostack, preserves_flags),
                );
            }
            #(#statements)*
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the attribute with `bounds` makes of `function`.
    fn expanded(bounds: &str, function: &str) -> Result<String, String> {
        let bounds: LaunchBounds = syn::parse_str(bounds).map_err(|error| error.to_string())?;
        let function: ItemFn = syn::parse_str(function).map_err(|error| error.to_string())?;
        expand(&bounds, &function).map(|tokens| tokens.to_string()).map_err(|error| error.to_string())
    }

    const BOUNDS: &str = "max_threads = WARPS * 32, min_blocks_per_sm = 2, barriers = 6";

    #[test]
    fn kernel_becomes_an_entry_for_the_device_only() {
        let text = expanded(BOUNDS, "/// # Safety\npub unsafe fn add(params: AddParams) { f() }").unwrap();
        for part in
            ["cfg (target_arch = \"nvptx64\")", "no_mangle", "extern \"ptx-kernel\" fn add", "WARPS * 32", "f ()"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.contains("CLUSTER_SIZE : u32 = (1) as u32"), "{text}");
        let clusters = format!("{BOUNDS}, cluster_size = BLOCKS");
        let text_with_clusters =
            expanded(&clusters, "/// # Safety\npub unsafe fn add(params: AddParams) { f() }").unwrap();
        assert!(text_with_clusters.contains("CLUSTER_SIZE : u32 = (BLOCKS) as u32"), "{text_with_clusters}");
        // The whole is one item: on a host, the first attribute drops it.
        assert!(text.starts_with("# [cfg"), "{text}");
        syn::parse_str::<ItemFn>(&text).unwrap();
    }

    #[test]
    fn each_misuse_has_its_own_message() {
        for (function, rule) in [
            ("unsafe fn f(p: P) {}", "`pub`"),
            ("pub fn f(p: P) {}", "`unsafe fn`"),
            ("pub unsafe extern \"C\" fn f(p: P) {}", "adds the ABI"),
            ("pub unsafe fn f<T>(p: T) {}", "not generic"),
            ("pub unsafe fn f(p: P) -> u32 { 0 }", "returns nothing"),
            ("pub unsafe fn f() {}", "exactly one parameter"),
            ("pub unsafe fn f(p: P, q: Q) {}", "exactly one parameter"),
            ("pub unsafe fn f(p: &P) {}", "by value"),
        ] {
            let error = expanded(BOUNDS, function).unwrap_err();
            assert!(error.contains(rule), "{function}: {error}");
        }
        let function = "pub unsafe fn f(p: P) {}";
        for (bounds, rule) in [
            ("", "missing: max_threads, min_blocks_per_sm, barriers"),
            ("max_threads = 32, barriers = 0", "missing: min_blocks_per_sm"),
            ("max_threads = 32, max_threads = 32", "given twice"),
            ("cluster_size = 2, cluster_size = 2", "given twice"),
            ("threads = 32", "unknown argument"),
        ] {
            let error = expanded(bounds, function).unwrap_err();
            assert!(error.contains(rule), "{bounds}: {error}");
        }
    }
}
