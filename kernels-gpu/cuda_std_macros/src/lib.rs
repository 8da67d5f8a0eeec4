//! The `#[kernel]` attribute of `cuda_std`.

use proc_macro::TokenStream;
use proc_macro2::TokenStream as Tokens;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::{Error, Expr, FnArg, Ident, ItemFn, ReturnType, Token, Visibility};

/// Makes a function an entry point of the PTX module.
///
/// ```ignore
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
///
/// Each is a constant expression of any integer type. The function is `pub`, `unsafe`, not generic, returns nothing and takes exactly one
/// parameter, by value (`repr(C)`, at most 4096 bytes). rustc has no attribute for launch bounds: the body starts with a PTX comment that
/// carries the three numbers, and `cuda_builder` makes directives of it. On a host the function is dropped.
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
}

impl Parse for LaunchBounds {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        const NAMES: [&str; 3] = ["max_threads", "min_blocks_per_sm", "barriers"];
        let mut values: [Option<Expr>; 3] = [None, None, None];
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            let Some(index) = NAMES.iter().position(|known| name == known) else {
                return Err(Error::new(name.span(), format!("unknown argument; expected {}", NAMES.join(", "))));
            };
            input.parse::<Token![=]>()?;
            if values[index].replace(input.parse()?).is_some() {
                return Err(Error::new(name.span(), format!("`{name}` is given twice")));
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        let missing: Vec<_> =
            NAMES.iter().zip(&values).filter(|(_, value)| value.is_none()).map(|(name, _)| *name).collect();
        let [Some(max_threads), Some(min_blocks_per_sm), Some(barriers)] = values else {
            return Err(input.error(format!("missing: {}", missing.join(", "))));
        };
        Ok(LaunchBounds { max_threads, min_blocks_per_sm, barriers })
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
    let LaunchBounds { max_threads, min_blocks_per_sm, barriers } = bounds;
    let (name, inputs) = (&sig.ident, &sig.inputs);
    Ok(quote! {
        #[cfg(target_arch = "nvptx64")]
        #(#attrs)*
        #[unsafe(no_mangle)]
        #vis unsafe extern "ptx-kernel" fn #name(#inputs) {
            const MAX_THREADS: u32 = (#max_threads) as u32;
            const MIN_BLOCKS_PER_SM: u32 = (#min_blocks_per_sm) as u32;
            const BARRIERS: u32 = (#barriers) as u32;
            const _: () = {
                ::core::assert!(MAX_THREADS % 32 == 0 && 0 < MAX_THREADS && MAX_THREADS <= 1024, "max_threads: 32, 64, .. 1024");
                ::core::assert!(0 < MIN_BLOCKS_PER_SM && MIN_BLOCKS_PER_SM <= 32, "min_blocks_per_sm: 1..=32");
                ::core::assert!(::core::mem::size_of::<#parameter_type>() <= 4096, "the parameter is larger than 4096 bytes");
            };
            // SAFETY: emits a comment.
            unsafe {
                ::core::arch::asm!(
                    "// kernel max_threads={} min_blocks_per_sm={} barriers={}",
                    const MAX_THREADS,
                    const MIN_BLOCKS_PER_SM,
                    const BARRIERS,
                    options(nomem, nostack, preserves_flags),
                );
            }
            #block
        }
    })
}
