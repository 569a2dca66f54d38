// Type traits, and bfloat.
namespace metal {
template <class T, T v> struct integral_constant {
  static constexpr constant T value = v; using value_type = T; using type = integral_constant;
  constexpr operator T() const { return v; }
  constexpr operator T() const constant { return v; }
};
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;
template <bool, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool b, class A, class B> using conditional_t = typename conditional<b, A, B>::type;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> static constexpr constant bool is_same_v = is_same<A, B>::value;
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T&> { using type = T; };
template <class T> struct remove_reference<T&&> { using type = T; };
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> struct remove_volatile { using type = T; };
template <class T> struct remove_volatile<volatile T> { using type = T; };
template <class T> struct __remove_as { using type = T; };
template <class T> struct __remove_as<device T> { using type = T; };
template <class T> struct __remove_as<threadgroup T> { using type = T; };
template <class T> struct __remove_as<thread T> { using type = T; };
template <class T> struct __remove_as<constant T> { using type = T; };
template <class T> struct __remove_as<__generic T> { using type = T; };
template <class T> struct remove_addrspace { using type = typename __remove_as<T>::type; };
template <class T> using remove_addrspace_t = typename __remove_as<T>::type;
template <class T> struct remove_pointer { using type = T; };
template <class T> struct remove_pointer<T*> { using type = T; };
template <class T> using remove_pointer_t = typename remove_pointer<T>::type;
template <class T> struct remove_cv {
  using type = typename remove_const<typename remove_volatile<T>::type>::type; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> struct decay { using type =
  typename remove_cv<typename __remove_as<remove_reference_t<T>>::type>::type; };
template <class T> using decay_t = typename decay<T>::type;
template <class F, class T> struct is_convertible : bool_constant<__is_convertible_to(F, T)> {};
template <class F, class T> static constexpr constant bool is_convertible_v = __is_convertible_to(F, T);
template <class T> struct __is_int : false_type {};
template <class T> struct __is_flt : false_type {};
#define MSL_T(x) template <> struct __is_int<x> : true_type {};
MSL_T(bool) MSL_T(char) MSL_T(signed char) MSL_T(uchar) MSL_T(short) MSL_T(ushort) MSL_T(int)
MSL_T(uint) MSL_T(long) MSL_T(ulong)
#undef MSL_T
}  // namespace metal

// ---- bfloat: clang's __bf16 has MSL's rules (no conversion from/to half); float -> bfloat
// without a cast compiles here, so the driver rejects it by reading the AST.
typedef __bf16 bfloat;

namespace metal {
template <> struct __is_flt<float> : true_type {};
template <> struct __is_flt<half> : true_type {};
template <> struct __is_flt<bfloat> : true_type {};
template <class T> struct is_integral : __is_int<remove_cv_t<T>> {};
template <class T> struct is_floating_point : __is_flt<remove_cv_t<T>> {};
template <class T> static constexpr constant bool is_integral_v = is_integral<T>::value;
template <class T> static constexpr constant bool is_floating_point_v = is_floating_point<T>::value;
template <class T> static constexpr constant bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T> struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <class T> static constexpr constant bool is_signed_v = is_floating_point_v<T> || (is_integral_v<T> && T(-1)
    < T(0));
template <class T> static constexpr constant bool is_unsigned_v = is_integral_v<T> && !(T(-1) < T(0));

}  // namespace metal
