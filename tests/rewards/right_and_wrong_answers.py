r"""
Kinds of answers: those that are right, and those that are wrong. Most were judged wrongly once.

A gold answer and answers to it have a tilde between them; such rows, two tildes or a line break.
"""

KINDS = {
    "notation": (
        r"""
\frac{1}{3} ~ \frac13 ~ \dfrac{1}{3} ~ \tfrac 1 3 ~~ \frac13 ~ \cfrac{1}{3} ~~ \frac{10}{3} ~ \frac{10}3
\frac\pi2 ~ \frac{\pi}{2} ~~ \frac \pi4 + 2 ~ 2 + \frac{\pi}{4} ~~ \frac1b ~ \frac{1}{b} ~~ 2\sqrt{3} ~ 2\sqrt3
\sqrt\pi ~ \sqrt{\pi} ~~ x^{2} ~ x^2 ~~ \left( 1, \frac{1}{2} \right) ~ (1,\tfrac12) ~~ 8\!:\!34 ~ 8:34
5 ~ 5. ~ \,5\; ~~ \sqrt[3]{2} ~ \sqrt[3]2 ~~ \sqrt{3} - 1 ~ -1 + sqrt(3) ~~ \sqrt[4]{2} ~ 2**(1/4)
\frac{1}{2}\sin x ~ sin(x)/2 ~~ 3.5 ~ 3 1/2 ~~ 6x ~ (2)(3)x ~~ 8x ~ 2(4)x ~~ B ~ \mathcal{B} ~~ f' ~ f' ~~ 3 ~ 3 = y
\text{Evelyn} ~ \textbf{Evelyn.} ~~ \text{(C)} ~ C ~~ \text{odd} ~ odd ~~ \text{Monday} ~ \mathrm{monday}
Brian ~ brian ~~ true ~ \text{True} ~~ No ~ NO ~~ abc ~ b \cdot c \cdot a ~~ ABC ~ CBA
\text{1:03 PM} ~ 1:03 \text{ PM} ~~ 1:30 PM ~ 1:30 pm ~~ 5\text{ m/s} ~ 5 m/s ~~ 3\text{ N} ~ 3 N
\text{B, E, G} ~ G, B, E ~~ -3 ~ −3 ~~ 2π ~ 2\pi ~~ \emptyset ~ \varnothing
\begin{pmatrix} 6 \\ 0 \end{pmatrix} ~ \begin{bmatrix} 6\\0 \end{bmatrix}
\begin{pmatrix} 1 \\ \phantom -1 \end{pmatrix} ~ \begin{pmatrix} 1 \\ 1 \end{pmatrix}
""",
        r"""
5 ~ 6 ~ -5 ~ 5, 6 ~~ -5 ~ 5 ~~ 5, 6 ~ 5 ~~ 1,2,3 ~ 1,2 ~~ \frac{1}{3} ~ \frac{3}{1} ~ 0.333 ~ \frac1{35}
\frac{\sqrt{3}}{2} ~ 0.866 ~~ \sqrt{35} ~ \sqrt35 ~~ 12 ~ 1 2 ~~ (1,2) ~ (2,1) ~ [1,2] ~ \{1,2\} ~~ (2,3] ~ [2,3)
\{1,2\} ~ (1,2) ~~ (1,2,3) ~ (3,2,1) ~~ 3:4 ~ 4:3 ~~ \text{odd} ~ \text{even} ~~ Brian ~ Brain ~~ Amy ~ \text{May}
true ~ False ~~ North ~ South ~ 42 ~~ 3:15 PM ~ 6:30 PM ~~ 2024-01-02 ~ 2021 ~~ \text{(C)} ~ \text{(D)}
\text{A} \text{ and } \text{B} ~ \text{A} \text{ and } \text{C}
3 \text{ red, } 4 \text{ blue} ~ 3 \text{ red, } 4 \text{ green}
3 \text{ red and } 4 \text{ blue} ~ 3 \text{ red and } 4 \text{ green} ~~ n \text{ even} ~ n \text{ odd}
\text{A5}_{11} ~ \text{A6}_{11} ~~ \text{undefined} ~ 0 ~~ E ~ E' ~~ E' ~ E''
""",
    ),
    "thousands": (
        r"""
10000 ~ 10{,}000 ~~ 1234567 ~ 1 234 567 ~~ 11111111100 ~ 11,\! 111,\! 111,\! 100 ~~ 10,\!000 ~ 10\,000
1,\!296,\!540 ~ 1296540 ~~ \frac{12}{5,\!525} ~ \frac{12}{5525} ~~ \$115,000 ~ 115000.00
1000(1.05)^t ~ 1,000(1.05)^t ~~ 2x + 1250 ~ 2x + 1,250 ~~ 1,000\% ~ 1000\% ~~ \frac{1,000\pi}{3} ~ \frac{1000\pi}{3}
x=2,150 ~ x=2, 150 ~ x=2150 ~~ 100,200,300 ~ 100, 200, 300 ~~ (x+1,200) ~ (1+x, 200)
100,000=72,300(1.008)^x ~ 72,300(1.008)^x=100,000 ~~ 56017895760 ~ 56,\!01,\!78,\!95,\!760 ~~ 0.5 ~ 0,5
""",
        r"""
(1,000) ~ 1000 ~~ 1.234 ~ 1,234 ~~ 0.5 ~ 0,6 ~~ 3.5 ~ 3, 5, 7 ~~ 1000 ~ (1,000) ~ 10,00 ~~ (20,100) ~ 20100
[0,100] ~ 100 ~~ \{1,120\} ~ 1120 ~~ 1,000,5 ~ 10005 ~~ 31,250 ~ 31.250 ~ 31 ~~ 1000000 ~ 1000001
""",
    ),
    "units and signs": (
        r"""
90^\circ ~ 90 ~~ 90^{\circ} ~ 90\text{ degrees} ~~ 90 ~ 90° ~~ \$12.50 ~ 12.50 ~~ 12.5\% ~ 12.5
50\% ~ \frac12 ~ 50% ~~ 0.335 ~ 33.5 percent ~~ 0.005 ~ \frac{1}{2}\text{ percent}
\cos 58^\circ ~ \cos 58 ~ \sin(32^{\circ}) ~~ 5 \text{ cm} ~ 5 ~ 5 cm
5 \text{ cm}^2 ~ 5 \mathrm{~square~centimeters} ~~ 864 \mbox{ inches}^2 ~ 864 \text{ sq. in.} ~~ 4\text{ p.m.} ~ 4 pm
99\pi \text{ square inches} ~ 99\pi ~~ 8\text{ meals} ~ 8 meals ~~ 30 \text{ mph} ~ 30 \text{ miles per hour}
10001_2 ~ 10001 ~~ \text{A5}_{11} ~ A5_{11}
""",
        r"""
5 \text{ cm} ~ 5 \text{ m} ~ 5 \text{ cm}^2 ~~ 5 \text{ inches} ~ 5 feet ~~ 5 \text{ cm}^2 ~ 5 \text{ cm}^3
5 \text{ square feet} ~ 5 \text{ cubic feet} ~~ 60^\circ ~ 60 \text{ radians} ~~ \$5 ~ 5 \text{ cents}
4\text{ p.m.} ~ 4\text{ a.m.} ~~ 5 \text{ hours} ~ 5 \text{ minutes} ~~ 50\% ~ 5\% ~~ 10001_2 ~ 10001_3 ~ 17
1011_2 ~ 11 ~~ 5m ~ 5 ~~ 2ab ~ 2
""",
    ),
    "mathematics": (
        r"""
0.5 ~ \frac{1}{2} ~~ .5 ~ 0.5 ~~ \frac{1}{3} ~ 1/3 ~~ 1\frac{12}{13} ~ \frac{25}{13} ~~ 2\sqrt{3} ~ \sqrt{12}
1024x ~ 2^{10}x ~~ (x-1)(x+2) ~ x^2+x-2 ~~ a + b + c ~ c + a + b ~~ \sin^2 t ~ (\sin t)^2 ~~ x ~ 2x/2
3+4i ~ (2+i)^2 ~~ -i ~ \frac{1}{i} ~~ ai + 1 ~ i(a - i) ~~ 2x - y = 1 ~ 2y - 4x = -2
0.5x + y = 1 ~ \frac{x}{2} + y = 1 ~~ 2x < 4 ~ x < 2 ~~ 2x + 3y \ge 7 ~ -2x - 3y \le -7 ~~ 1 < 2x \le 3 ~ 3 \ge 2x > 1
x < 1 ~ -x > -1 ~~ 5 ~ x = 5 ~~ y = 2x + 3 ~ 2x + 3 ~~ (p, q) = (3, 2) ~ (3, 2) ~~ x+2y=3 ~ 2x + 4y = 6 ~~ 1,2 ~ 2, 1
100, 200 ~ 100,200 ~~ 12\text{ and }13 ~ 13, 12 ~~ 1+\sqrt{2}, 1-\sqrt{2} ~ 1 \pm \sqrt{2}
[-2,7] ~ x \in [-2,7] ~ -2 \le x \le 7 ~~ (-\infty,2)\cup(3,\infty) ~ (3,\infty)\cup(-\infty,2)
\approx 8.24 \text{ mph} ~ 8.24 ~~ 11 ~ x\approx11 ~~ \frac{1}{2^{98}} ~ 2^{-98}
""",
        r"""
x=5 ~ y=5 ~ x + 2 = 7 ~~ x < 2 ~ 2x < 4 ~~ 2x < 4 ~ -x < -2 ~ x \le 2 ~~ 1 < 2x \le 3 ~ 1 < 2x < 3
2x - y = 1 ~ 2x - y = 2 ~ x - y = 1 ~~ x ~ 2x ~~ 3+4i ~ (2-i)^2 ~ 3-4i ~~ i ~ \frac{1}{i} ~~ 5 ~ (2)(3) ~~ 3 ~ 3 1/2
\cos 58^\circ ~ \sin 58^\circ ~~ x^2 ~ x^3 ~~ 3x+2 ~ 3y+2 ~~ 5\pi ~ 5 ~~ \pm 2 ~ 2 ~~ \infty ~ -\infty
(-\infty,2)\cup(3,\infty) ~ (-\infty,2) ~~ [-2,7] ~ -2 < x \le 7
\begin{pmatrix} 1 & 0 \\ 0 & 3 \end{pmatrix} ~ \begin{pmatrix} 1 & 1 \\ 0 & 3 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} ~ \begin{pmatrix} 2 \\ 1 \end{pmatrix}
\frac{1}{2^{98}} ~ \frac{1}{3^{98}} ~ -\frac{1}{2^{98}} ~~ 0.00000001 ~ 0.00000002
""",
    ),
    "text that is no unit": (
        r"""
7 ~ 7 \text{ apples} ~ 7 \text{ square units} ~ 7 red balls ~ 7\text{ ordered pairs} ~ 7\,\text{cm} ~ 7 \mathrm{~cm}
7 ~ 7 \text{ students} ~~ 17 ~ 17 \text{ integers} ~~ 17\text{ any text} ~ 17 ~~ 12 ~ 12\text{ sq. units}
3 ~ 3 hours ~~ 5\pi \text{ square units} ~ 5\pi ~~ 8 ~ 8 \text{ small boxes} ~~ \frac12 ~ \frac12 \text{ hour}
4 ~ 4\text{ floors} ~ 4 notebooks ~~ 6 ~ 6 \text{ orders} ~~ 9 ~ 9 \text{ handshakes} ~~ 2 ~ 2 \text{ units}
5 ~ 5\text{ knots} ~ 5\text{ sandwiches} ~~ 10 ~ 10\text{ tons}
""",
        r"""
7 ~ 7 \text{ or 8} ~ 7 \text{ or more} ~ 7 \text{ is not the answer} ~ 7 million ~ 7\text{ million}
7 ~ 7 \text{ thousand dollars} ~ 7 \text{ or eight} ~ 7 \text{ and 8} ~ 7 \text{ to 9} ~ 7 \text{ at least}
7 ~ 7 \text{ at most} ~ 7\text{ or less} ~ 7\text{ or fewer apples} ~ 7 \text{ hundred} ~ 7 hundred
7 ~ 7\text{ billion people} ~ 7 \text{ dozen} ~ 7\text{ thirds} ~ 7 \text{ halves} ~ 7 \text{ squared}
7 ~ 7 \text{ plus one} ~ 7 \text{ minus two} ~ 7\text{ times ten} ~ 7 \text{ but maybe eight} ~ 7 \text{ if not 8}
7 ~ 7 \text{ unless x is odd} ~ 7 \text{ more than half} ~ 7 \text{ less than 8} ~ 7 \text{ through nine}
7 ~ 7 \text{ or so many} ~ 7 or more ~ 7 or eight ~ 7 is wrong ~ 7 \text{ not} ~ 7\text{ is too small} ~ 7 \text{, 8}
7 ~ 7 \text{ (or 8)} ~ 7 \text{ factorial} ~ 7 \text{ over two} ~ 7 \text{ divided by 2} ~ 7\text{ between them}
7 ~ \text{at least } 7 ~ \text{not } 7 ~ \text{more than } 7 ~ \text{less than } 7 \text{ apples} ~ \text{7 or 8}
7 ~ \text{8 or 7} ~ \text{not 7} ~ 7 \text{ k} ~ 7\text{ versus eight} ~ 7 \text{ except Monday}
7 ~ 7 \text{ either way eight} ~ 7\text{ nor eight} ~ 7 \text{ twice} ~~ 7\text{ million} ~ 7 ~~ 7 \text{ or more} ~ 7
""",
    ),
    "units": (
        r"""
5 \text{ m/s} ~ 5 \text{ meters per second} ~~ 5\text{ N} ~ 5 \text{ newtons} ~~ 5 \text{ J} ~ 5\,\text{joules}
36 \text{ km/h} ~ 36 \text{ kilometers per hour} ~ 36 \text{ kph} ~~ 30 \text{ mph} ~ 30 \text{ miles/hour}
30\text{ miles per hour} ~ 30 \text{ mi/h}
10\text{ m/s}^2 ~ 10 \text{ m/s}^2 ~ 10 \text{ meters per second squared} ~~ 5\text{ km} ~ 5 \text{ kilometers}
5\text{ nm} ~ 5 \text{ nanometers} ~~ 5 \mathrm{~km} / \mathrm{h} ~ 5\text{ km/h} ~~ 5\text{ m/s} ~ 5
5 ~ 5 \text{ m/s} ~ 5 \text{ km/h} ~ 5 km/h ~ 5 \, \mathrm{m/s^2} ~~ 5 \text{ W} ~ 5\text{ watts}
5 \text{ Hz} ~ 5 \text{ hertz} ~~ 20^\circ \text{C} ~ 20 \text{ degrees Celsius} ~~ 20^\circ\text{C} ~ 20^\circ ~ 20
5\text{ cm}^3 ~ 5\text{ cubic centimeters} ~~ 5 \text{ apples} ~ 5\text{ fruits}
24 \text{ ways} ~ 24 \text{ arrangements} ~~ 5\text{ feet} ~ 5 ft ~~ 5\text{ grams} ~ 5\text{ g} ~~ 3 \text{ N} ~ 3
8\text{ dollars per hour} ~ \$8 ~~ 8\text{ cents} ~ 8 ~~ 5\text{ liters} ~ 5\text{ L}
5\text{ kWh} ~ 5 \text{ kilowatt-hours} ~~ 2\text{ mol} ~ 2\text{ moles}
""",
        r"""
5\text{ N} ~ 5 \text{ J} ~~ 5\text{ km} ~ 5 \text{ nm}
5\text{ m/s} ~ 5 \text{ km/h} ~ 5\text{ m/s}^2 ~ 5\text{ m} ~ 5\text{ feet per second}
5\text{ newtons} ~ 5 \text{ joules} ~~ 5\text{ W} ~ 5\text{ V} ~~ 5\text{ m} ~ 5\text{ m/s}
5\text{ km/h} ~ 5\text{ mph} ~~ 5 \text{ miles per hour} ~ 5 \text{ miles per minute} ~ 5\text{ hours}
5\text{ kg} ~ 5\text{ N} ~~ 5 \text{ Hz} ~ 5\text{ kHz} ~~ 5\text{ mW} ~ 5\text{ MW} ~~ 5\text{ ms} ~ 5 \text{ s}
20^\circ \text{C} ~ 20^\circ \text{F} ~~ 5\text{ Pa} ~ 5\text{ kPa}
5 \mathrm{~km} / \mathrm{h} ~ 5 \mathrm{~m} / \mathrm{s} ~~ 5\text{ tons} ~ 5\text{ kg} ~~ 5\text{ J} ~ 5\text{ kJ}
5\text{ dollars per hour} ~ 5\text{ dollars per day} ~~ 5\text{ euros} ~ 5 \text{ dollars} ~~ 5\text{ L} ~ 5\text{ mL}
5\text{ A} ~ 5\text{ V} ~~ 5 \text{ moles} ~ 5\text{ grams} ~~ 5 \text{ cm} ~ 5 km/h ~~ 5\text{ cm}^2 ~ 5\text{ m}^2
""",
    ),
    "evaluation": (
        r"""
5 ~ 5.0 ~ x=5 ~ +5 ~ (5) ~ 2+3=5 ~ \sqrt{25}=5 ~ {5} ~ \approx 5 ~ \left(5\right) ~~ 1500 ~ 1.5 \times 10^3 ~ 1.5e3
\frac12 ~ 0.5 ~ 1/2 ~ 50\% ~~ -\frac12 ~ \frac{-1}{2} ~ -1/2 ~ -0.5 ~ \frac{1}{-2} ~~ \frac72 ~ 3\frac12 ~ 3 1/2 ~ 3.5
\frac{1}{3} ~ \frac26=\frac13 ~~ x=5 ~ 5 ~~ 10,000 ~ 10000 ~~ \frac{4}{11} ~ 0.\overline{36} ~~ \sqrt{4} ~ 2
2+2 ~ 4 ~~ \frac{2}{4} ~ \frac12 ~~ 2^{10} ~ 2^{10} ~ 1024 ~~ 2\sqrt3 ~ \sqrt{12}
\frac{\sqrt3}{3} ~ \frac{1}{\sqrt3} ~~ \frac{\pi}{2} ~ \frac{2\pi}{4} ~~ 1.44 ~ 1.2^2 ~~ \$5 ~ 5
5 \text{ cm} ~ 5.0 \text{ cm} ~~ 1, 2 ~ 2, 1 ~~ (1,2) ~ (1.0, 2) ~~ -5 ~ - 5 ~~ \frac{3}{2} ~ 1\frac{1}{2}
0 ~ -0 ~ 0.0 ~~ \frac{1}{1000} ~ 0.001 ~~ x+1 ~ 1+x ~~ \frac{17}{4} ~ 4 \frac{1}{4} ~~ 90^\circ ~ 90.0 ~~ 12 ~ n = 12
2024 ~ 2,024 ~~ \frac{1}{4} ~ x = \frac14 ~ P(A) = \frac14 ~~ 3628800 ~ 3{,}628{,}800
5.0 ~ 5 ~ 5.00 ~ x=5 ~~ -5.00 ~ -5
""",
        r"""
5 ~ 2+3 ~ \frac{10}{2} ~ \sqrt{25} ~ |-5| ~ --5 ~ x=2+3 ~ 5 \cdot 1 ~ 5^1 ~ 5/1 ~ \frac51 ~ 10-5 ~ \sqrt[3]{125}
5 ~ 5 + 0i ~ 2+3=4+1 ~ \gcd(10, 15) ~ \int_0^5 dx ~~ 1024 ~ 2^{10}
\frac12 ~ \frac24 ~ 2/4 ~ \frac{50}{100} ~ \sin 30^\circ ~~ 120 ~ 5! ~~ 2 ~ \log_2 4 ~ \left(\sqrt{2}\right)^2
1 ~ \cos 0 ~ \frac{7}{7} ~ e^0 ~~ 10 ~ \binom{5}{2} ~~ 6 ~ (2)(3) ~ 2 \cdot 3 ~ 2 \times 3 ~~ 8 ~ 2(4)
\frac{5}{6} ~ \frac12+\frac13 ~~ \frac{1}{6} ~ \frac12\cdot\frac13 ~~ 3 ~ \lfloor \pi \rfloor
55 ~ \sum_{n=1}^{10} n ~~ \frac{13}{4} ~ 3+\frac14 ~~ \frac{1}{8} ~ 2^{-3} ~~ \frac{2}{3} ~ \frac{4/3}{2}
0 ~ \sin \pi ~ x^2-x^2 ~~ 5\text{ cm} ~ 2+3 \text{ cm} ~~ \$5 ~ \$(2+3) ~~ 90^\circ ~ 30^\circ+60^\circ
50\% ~ \frac{2}{4} ~~ x=5 ~ x = 2+3 ~~ 12 ~ \max(3,12) ~~ -1 ~ i^2 ~~ 100 ~ 10^2 ~~ 10000 ~ 10^4 \text{ cm}
\frac{3}{2} ~ \frac{1.5}{1} ~~ 5.0 ~ 2+3 ~ \frac{10}{2} ~~ -5.00 ~ -2-3
""",
    ),
    "periodic decimals": (
        r"""
0.\overline{36} ~ \frac{4}{11} ~ 0.\overline{36} ~ 0.\overline{3636} ~~ \frac{4}{11} ~ 0.\overline{36}
0.1\overline{6} ~ \frac16 ~~ \frac16 ~ 0.1\overline{6} ~~ .\overline{3} ~ \frac13
\frac13 ~ 0.\overline3 ~ 0.\bar{3} ~ 0.\dot{3} ~~ \frac53 ~ 1.\overline{6} ~~ -\frac13 ~ -0.\overline{3}
1 ~ 0.\overline{9} ~~ 0.\overline{3} ~ 0.3\overline{3} ~~ \frac{1}{7} ~ 0.\overline{142857}
x=\frac13 ~ x = 0.\overline{3} ~~ \overline{AB} ~ \overline{AB} ~~ \frac{41}{333} ~ 0.\overline{123}
""",
        r"""
0.\overline{36} ~ 0.36 ~ 0.3\overline{6} ~ 0.\overline{63} ~~ 0.36 ~ 0.\overline{36}
\frac13 ~ 0.\overline{34} ~ 0.33 ~ -0.\overline{3} ~~ 0.3\overline{6} ~ 0.\overline{36} ~~ \frac16 ~ 0.\overline{16}
0.\overline{3} ~ 0.\overline{6} ~ 3 ~ \frac{3}{10} ~ 0.33 ~~ \overline{AB} ~ \overline{AC} ~~ 36 ~ 0.\overline{36}
""",
    ),
    "type and marks in the box": (
        r"""
7 ~ \boldsymbol{7} ~ \textcolor{red}{7} ~ **7** ~ 7 \tag{1} ~ \bm{7} ~ \color{red}{7} ~ \color{red} 7
7 ~ {\color{blue}7} ~ \mathbf{7} ~ \mathsf{7} ~ \mathtt{7} ~ \underline{7} ~ \large 7 ~ \Large{7} ~ \tag*{1} 7
7 ~ \emph{7} ~ *7* ~ __7__ ~ \textbf{7} ~ \mathbf{7} \text{ cm} ~ \hspace{1mm} 7 ~ \textsf{7} ~ \texttt{7}
7 ~ \ensuremath{7} ~ \quad 7 ~ `7`
\frac12 ~ \boldsymbol{\frac{1}{2}} ~ \textcolor{red}{\frac{1}{2}} ~ **\frac{1}{2}** ~ \mathbf{\frac{1}{2}}
x+1 ~ \boldsymbol{x+1} ~~ \sqrt{2} ~ \textcolor{blue}{\sqrt{2}} ~~ (1,2) ~ \boldsymbol{(1,2)}
x=5 ~ \boldsymbol{x = 5} ~~ \text{odd} ~ \textbf{odd} ~ \textcolor{red}{\text{odd}} ~~ 2^3 ~ 2**3
-7 ~ \boldsymbol{-7} ~~ x ~ \mathit{x} ~~ \pi ~ \boldsymbol{\pi}
""",
        r"""
7 ~ \boldsymbol{8} ~ \textcolor{red}{8} ~ **8** ~ 8 \tag{7} ~ \color{7}{8} ~ \boldsymbol{7} \boldsymbol{8}
7 ~ \boldsymbol{7}, \boldsymbol{8} ~ \textcolor{red}{7} + 1 ~ \cancel{7} 8 ~ \cancel{7} ~ \sout{7} ~ \not 7
7 ~ **7** **8** ~~ 1 ~ 7 \tag{1} ~~ \frac12 ~ \boldsymbol{\frac{1}{3}} ~~ 8 ~ 2**4
\text{odd} ~ \textcolor{red}{\text{even}} ~~ 78 ~ \textcolor{red}{7}\, \textcolor{red}{8}x
(1,2) ~ \boldsymbol{(2,1)} ~~ red ~ \textcolor{red}{7}
""",
    ),
    "delimiters in the box": (
        r"""
\(7\) ~ 7 ~~ 7 ~ \(7\) ~ \[7\] ~ $7$ ~ $$7$$ ~~ \( \frac{1}{2} \) ~ \frac12 ~~ \(\frac{1}{2}\) ~ 0.5
\( x+1 \) ~ 1+x ~~ \[ \frac{1}{2} \] ~ \frac12 ~~ \( 2\sqrt{3} \) ~ \sqrt{12} ~~ \( (1,2) \) ~ (1,2)
\(\text{odd}\) ~ odd ~~ \( 90^\circ \) ~ 90 ~~ \( 5 \text{ cm} \) ~ 5 cm ~~ \(x = 5\) ~ 5 ~~ \( [1,2] \) ~ [1,2]
\(1, 2\) ~ 1, 2 ~~ 1, 2 ~ \(1\), \(2\) ~ \(1\) and \(2\) ~~ \(3\) cm ~ 3 ~~ 3 \(\text{cm}\) ~ 3 cm
\begin{pmatrix} 1 \\[2pt] 2 \end{pmatrix} ~ \begin{pmatrix} 1 \\ 2 \end{pmatrix} ~~ \(\{1,2\}\) ~ \{2,1\}
\( A \) ~ A ~~ \(\frac{\pi}{4}\) ~ \frac{\pi}{4}
""",
        r"""
\(7\) ~ 8 ~~ 7 ~ \(8\) ~ \(7\), \(8\) ~ \(7\) or \(8\) ~ $7$ or $8$ ~~ \(\frac{1}{2}\) ~ \frac13
(1,2) ~ \( [1,2] \) ~~ \( (1,2) \) ~ (2,1) ~~ \( A \) ~ B
\begin{pmatrix} 1 \\[2pt] 2 \end{pmatrix} ~ \begin{pmatrix} 2 \\ 1 \end{pmatrix} ~~ \( \{1,2\} \) ~ (1,2)
\(x=5\) ~ x=6
""",
    ),
    "options with their value": (
        r"""
\textbf{(C)}\ 12 ~ 12 ~ C ~ (C) ~ \text{(C)} ~ \textbf{(C) } 12 ~ C. 12 ~ C: 12 ~~ \textbf{(C) }12 ~ (C) 12
C ~ \textbf{(C)}\ 12 ~ C. x = 42 ~ (C) x = 42 ~ \textbf{C} ~ Option C ~ \text{Choice C}
\text{(C)} ~ \textbf{(C)}\ 12 ~~ 12 ~ \textbf{(C)}\ 12 ~ (C) 12 ~~ \textbf{(B)}\ \frac{1}{2} ~ \frac12 ~ 0.5
\textbf{(A)}\ \sqrt{2} ~ \textbf{(A)} \sqrt2 ~~ \mathrm{(C)}\ 12 ~ 12 ~~ \text{(C) } 12 ~ C
\textbf{(E)}\ 2\pi ~ 2\pi ~~ (\text{C})\ 12 ~ 12 ~~ \textbf{(C)}~12 ~ C ~~ \textbf{(D)}\ x+1 ~ 1+x
\textbf{(C)}\ 12\text{ cm} ~ 12 cm ~~ \textbf{(B)}\ \text{odd} ~ odd ~~ \textbf{C}: 12 ~ 12
""",
        r"""
\textbf{(C)}\ 12 ~ 13 ~ D ~ \textbf{(D)}\ 12 ~ \textbf{(C)}\ 13 ~ \textbf{(C)}\ 12 \textbf{(D)}\ 13 ~ 12c ~ C, D
\textbf{(C)}\ 12 ~ (A) 1 (B) 2 (C) 12
C ~ \textbf{(D)}\ 12 ~ C. or D. ~ \textbf{(C)}\ 12\ \textbf{(D)}\ 13 ~ \textbf{(A)}\ C
12 ~ \textbf{(C)}\ 13 ~ \textbf{(C)}\ 12\ \textbf{(D)}\ 13 ~ (C) 2+10 ~~ D ~ C. x = 42
\textbf{(B)}\ \frac{1}{2} ~ \frac13 ~~ 12c ~ \textbf{(C)}\ 12 ~~ (A)(B) ~ (C)(D)
""",
    ),
    "equations that are false": (
        r"""
5 ~ 5=5 ~ 2+3=5 ~ x=2+3=5 ~ 10/2=5 ~ y = 5 ~ a+b=5 ~ \sqrt{25} = 5 ~ f(2) = 5 ~ 5 = x ~~ x=5 ~ x = 5
0.5 ~ \frac12 = 0.5 ~~ \frac13 ~ \frac26 = \frac13 ~~ 2\sqrt3 ~ \sqrt{12} = 2\sqrt{3} ~~ 10 ~ \binom{5}{2} = 10
120 ~ 5! = 120 ~~ y = 2x+3 ~ 2x+3 ~~ \frac{2}{3} ~ \frac{2}{3} \approx 0.67 ~ \frac{2}{3} = 0.\overline{6}
\frac{\pi}{4} ~ \arctan 1 = \frac{\pi}{4} ~~ 11 ~ x = 5+5+1 = 11 ~~ 36\pi ~ \pi \cdot 6^2 = 36\pi ~~ 7 ~ |AB| = 7
""",
        r"""
5 ~ 6=5 ~ 2+2=5 ~ 5=6 ~ 1=2=3=4=5 ~ 0=5 ~ \pi = 5 ~ 1+1=3=5 ~ 5 \ne 6 ~ 5<6 ~ 5 \le 5 ~~ \frac12 ~ \frac13=\frac12
\sqrt2 ~ \sqrt3 = \sqrt2 ~~ 2\sqrt3 ~ \sqrt{13} = 2\sqrt{3} ~~ x=5 ~ 6=5 ~~ \frac{\pi}{4} ~ \pi=\frac{\pi}{4}
6 ~ 6=5 ~~ 0 ~ 1=0
""",
    ),
    "derivatives": (
        r"""
\frac{dx}{dy} ~ \frac{dx}{dy} ~~ \frac{dy}{dx} ~ \dfrac{dy}{dx} ~ \frac{\mathrm{d}y}{\mathrm{d}x}
\frac{dy}{dx} = 2x ~ 2x ~~ 2x ~ \frac{dy}{dx} = 2x ~~ h=\frac{da}{c} ~ h=\frac{ad}{c}
\frac{da}{c} ~ d \cdot \frac{a}{c} ~~ d ~ d ~~ ad ~ da ~~ d+a ~ a+d ~~ 2\frac{dy}{dx} ~ \frac{dy}{dx} \cdot 2
\frac{d}{2} ~ 0.5d ~~ bd ~ db
""",
        r"""
\frac{dx}{dy} ~ \frac{dy}{dx} ~~ \frac{dy}{dx} ~ \frac{dx}{dy} ~ 0 ~ \frac{dz}{dx} ~ \frac{dy}{dt} ~ \frac{y}{x}
0 ~ \frac{dy}{dx} ~~ \frac{\partial f}{\partial x} ~ \frac{\partial f}{\partial y} ~~ \frac{da}{c} ~ \frac{dc}{a}
2\frac{dy}{dx} ~ 3\frac{dy}{dx} ~~ 5 ~ \frac{dy}{dx} ~~ \frac{dy}{dx} = 2x ~ \frac{dx}{dy} = 2x ~~ ad ~ ab
""",
    ),
    "transposes": (
        r"""
A^T ~ A^T ~ A^{T} ~ A^\top ~ A^{\mathrm{T}} ~~ A^{\top} ~ A^T ~~ 2A^T ~ A^T 2 ~~ A ~ A ~~ A^{-1} ~ A^{-1} ~~ 2^T ~ 2^T
(AB)^T ~ (AB)^T ~~ A^T + B ~ B + A^T ~~ A^{\intercal} ~ A^T
""",
        r"""
A^T ~ A ~ A^{-1} ~ B^T ~ A^2 ~~ A ~ A^T ~ A^\top ~ A^{\mathrm{T}} ~ A^* ~ A^\dagger ~ \bar{A} ~~ A^{\top} ~ A
A^{-1} ~ A ~~ \bar{z} ~ z ~~ z ~ \overline{z} ~~ 2 ~ 2^T
""",
    ),
    "roots of quotients": (
        r"""
\frac{1}{\sqrt{n}} ~ \sqrt{1/n} ~~ \sqrt{1/n} ~ \frac{1}{\sqrt{n}} ~~ \sqrt{\frac{1}{n}} ~ n^{-1/2}
\sqrt{\frac{2}{n}} ~ \frac{\sqrt{2}}{\sqrt{n}} ~~ \frac{\sqrt{n}}{n} ~ \sqrt{\frac{1}{n}} ~~ \sqrt{4x} ~ 2\sqrt{x}
\sqrt{\frac{x}{4}} ~ \frac{\sqrt{x}}{2} ~~ c=\sqrt{\frac{1}{n}} ~ c=\frac{1}{\sqrt{n}}
\frac{\sqrt2}{2} ~ \sqrt{\frac12}
""",
        r"""
\frac{1}{\sqrt{n}} ~ \sqrt{n} ~ \frac{1}{n} ~ -\sqrt{\frac1n} ~~ \sqrt{x^2} ~ x
x ~ \sqrt{x^2} ~ \sqrt{x}\sqrt{x}x/x^2 ~~ |x| ~ x ~~ \sqrt{\frac{m}{n}} ~ \sqrt{\frac{n}{m}}
\sqrt{x+y} ~ \sqrt{x}+\sqrt{y} ~~ \sqrt{x^2+1} ~ x+1 ~~ \sqrt{2/n} ~ \frac{2}{\sqrt{n}} ~~ \sqrt[4]{x^2} ~ \sqrt[3]{x}
""",
    ),
    "e as a name": (
        r"""
e ~ \mathrm{e} ~ \text{e} ~~ \mathrm{e} ~ e ~~ e^2 ~ \mathrm{e}^2 ~~ \mathrm{e}^{x} ~ e^x
1-\frac{1}{\mathrm{e}} ~ 1-\frac1e ~~ 1-\frac1e ~ \frac{\mathrm{e}-1}{\mathrm{e}}
\frac{1}{e} ~ \frac{1}{\mathrm e} ~ \mathrm{e}^{-1} ~~ 2\mathrm{i} ~ 2i ~~ 3+4i ~ 3+4\mathrm{i}
e^{\pi} ~ \mathrm{e}^{\pi} ~~ 1 ~ \mathrm{e}^0=1 ~~ \mathrm{E} ~ E ~~ \ln \mathrm{e}^2 ~ 2 ~~ 2e ~ 2\mathrm{e}
""",
        r"""
e ~ \mathrm{d} ~ \mathrm{x} ~~ e^2 ~ \mathrm{e}^3 ~~ 1-\frac{1}{\mathrm{e}} ~ 1+\frac{1}{e}
1-\frac{1}{e} ~ 1+\frac{1}{\mathrm{e}} ~~ \mathrm{e} ~ 2.7 ~~ 2\mathrm{i} ~ 2 ~~ 3+4\mathrm{i} ~ 3-4i
\mathrm{e}^x ~ x ~ \mathrm{e}^{-x}
""",
    ),
    "intervals as inequalities": (
        r"""
[2,\infty) ~ x \ge 2 ~ x \in [2,\infty) ~~ x \ge 2 ~ [2,\infty) ~~ (2,\infty) ~ x > 2 ~ 2 < x ~ \{x \mid x > 2\}
(-\infty, 2) ~ x<2
(-\infty,2)\cup(5,\infty) ~ x < 2 \text{ or } x > 5 ~ x \in (-\infty,2)\cup(5,\infty) ~ x < 2, x > 5 ~ x<2 \lor x>5
x < 2 \text{ or } x > 5 ~ (-\infty,2)\cup(5,\infty) ~ x > 5 \text{ or } x < 2
[2,5) ~ 2 \le x < 5 ~ x \ge 2 \text{ and } x < 5 ~ 5 > x \ge 2 ~~ x \ge 2 \text{ and } x < 5 ~ [2,5)
(-\infty,2]\cup[5,\infty) ~ x \le 2 \text{ or } x \ge 5 ~~ (-\infty,3)\cup(3,\infty) ~ x \ne 3 ~~ [2,5] ~ x \in [2,5]
x \in [2,5] ~ 2 \le x \le 5 ~~ 2 < x < 5 ~ x \in (2,5) ~~ (2,5) ~ 2 < y < 5
(-\infty,-2)\cup(2,\infty) ~ x > 2 \text{ or } x < -2 ~~ (0,1) \cup (1, \infty) ~ 0<x<1 \text{ or } x>1
[\frac12,\infty) ~ x \ge 0.5 ~~ [\pi, 2\pi] ~ \pi \le x \le 2\pi ~~ x \ne 1, x \ne 2 ~ x \ne 2, x \ne 1
(-\infty,1)\cup(1,2)\cup(2,\infty) ~ x \ne 1 \text{ and } x \ne 2
""",
        r"""
[2,\infty) ~ x > 2 ~ x \le 2 ~~ (2,\infty) ~ x \ge 2 ~ 2x > 2
(-\infty,2)\cup(5,\infty) ~ x < 2 \text{ and } x > 5 ~ x < 2 ~ x > 2 \text{ or } x < 5 ~ x \le 2 \text{ or } x > 5
[2,5) ~ 2 < x < 5 ~ x \ge 2 \text{ or } x < 5 ~ 2 \le x \le 5 ~ x<5 ~~ (-\infty,3)\cup(3,\infty) ~ x = 3 ~ x \ne 4
x < 2 \text{ or } x > 5 ~ x < 2 \text{ or } x > 6 ~ x < 2 \text{ and } x > 5
(2,5) ~ 2 ~ 2 < x < y < 5 ~ x<2 \text{ or } x > 5 ~~ 2 ~ x > 2 ~ x \ge 2 ~~ x = 2 ~ x \ge 2
5 ~ x < 5 \text{ or } x \ge 5 ~~ (-\infty,2) ~ 2 < x ~~ (2,3) ~ (3,2) ~~ (-2,2) ~ |x|<2 ~ -4<2x<4 ~ x^2<4
x \ne 1, x \ne 2 ~ x \ne 1, x \ne 3 ~~ x \ge 0, x < 5 ~ x \ge 1, x < 7 ~~ \mathbb{R} ~ x \ge 1, x < 7
""",
    ),
    "text to the parser": (
        r"""
x \equiv 3 \pmod 7 ~ x \equiv 3 \pmod 7 ~ x \equiv 3 \pmod{7} ~ x\equiv3\bmod{7} ~ x \equiv 3 \ (\text{mod}\ 7)
x \equiv 3 \pmod 7 ~ x \equiv 3 (mod 7) ~ $x \equiv 3 \mod 7$. ~ x ≡ 3 (mod 7) ~ x \equiv 3\,(\bmod\,7)
x \equiv 3 \pmod{13} ~ x \equiv 3 \pmod 13 ~~ A^* ~ A^{*} ~~ x \to \infty ~ x \rightarrow \infty
n \mid m \text{ if and only if } m = n ~ n\mid m\text{ if and only if }m=n
p \land q ~ p \wedge q ~~ \mathbb{Z}_5 ~ \mathbb Z_{5} ~~ \frac{1}{23} \mid n ~ \frac1{23} \mid n
\{ x \in \mathbb{R} : x \neq 2 \} ~ \{x\in\mathbb{R}:x\ne2\} ~~ 日本 ~ \text{日本}
""",
        r"""
x \equiv 3 \pmod 7 ~ x \equiv 4 \pmod 7 ~ x \equiv 3 \pmod{8} ~ x \equiv 3 \pmod{77} ~ x \equiv 3 ~ 3 ~ x
x \equiv 3 \pmod{13} ~ x \equiv 31 \pmod 3 ~ x \equiv 3 \pmod 1 ~~ A^* ~ A ~ B^* ~ 3 ~~ x \to \infty ~ \infty
p \land q ~ p \lor q ~ q \land p ~~ \mathbb{Z}_5 ~ \mathbb{Z}_6 ~ 5 ~~ \frac{1}{23} \mid n ~ \frac{12}{3} \mid n
\{ x \in \mathbb{R} : x \neq 2 \} ~ \{ x \in \mathbb{R} : x = 2 \} ~ 2 ~~ 日本 ~ 東京
""",
    ),
    "hedging": (
        r"""
5 ~ 5
""",
        r"""
5 ~ 5 \text{ or } 6 ~ 5 or 6 ~ 5/6 ~ 5 \pm 1 ~ [5,6] ~ (5,6) ~ \{5,6\} ~ 5;6 ~ 5 6 ~ 5 \mid 6 ~ 5\ne6 ~ 5<6 ~ x=5,y=6
5 ~ 5 \to 6 ~ 5\sim 6 ~ 5 \cup 6 ~ \{5\} \cup \{6\} ~ 5 \vee 6 ~ 5 \lor 6 ~ 5 \land 6 ~ \text{5 and 6}
5 ~ 5\text{ and not }6 ~ 5 \text{ or, if wrong, } 6 ~ 5\ \text{or}\ 6 ~ 5\quad 6 ~ \begin{cases} 5 \\ 6 \end{cases}
5 ~ \begin{pmatrix}5\\6\end{pmatrix} ~ 5\\6 ~ 5 \& 6 ~ 5 & 6 ~ 5\newline 6 ~ x \in \{5,6\} ~ 5 \equiv 6
5 ~ 5 \Rightarrow 6 ~ 6 \Rightarrow 5 ~ 6 \to 5 ~ 6 \approx 5 ~ 5 \cong 6 ~ 5\text{? }6 ~ 6\text{ no, } 5 ~ 5! ~ 5\%6
5 ~ 5 \underset{6}{} ~ \overset{6}{5} ~ \overset{5}{6} ~ \stackrel{6}{5} ~ 5\phantom{6}7 ~ \frac{5}{} ~ 5 \mod 6
5 ~ 5 \pmod 6 ~ x>4 ~ 4<x<6 ~ \exists x: x=5 ~ 5 \in \mathbb{Z} ~ n \in \mathbb{Z} ~ \mathbb{R} ~ x \ge 5
5 ~ \min\{5,6\} ~ \max\{5,4\} ~ 5 \wedge 6 ~ y=x=5,6 ~ 6,5=5 ~ (5)(6) ~ 5_{6}7 ~ 5^6 ~ 5,\text{ or }6
5 ~ 5\text{ or }5\text{ or }6 ~ -5=5 ~ |5| ~ \pm5 ~ 5=-5 ~ 5 \lor 5 ~ ? ~ x ~ \text{the answer} ~ \text{five} ~ 5x=5x
5 ~ \square ~ \text{answer is }5 ~ 4,5,6,\ldots ~ \ldots,5 ~ 10-5 ~ \text{Five or six} ~ \int_{-\infty}^{\infty} 5
5 ~ 0/0 ~ \frac{0}{0} ~ \infty ~ \text{NaN} ~ 5\div1 ~ 5\cdot\frac{6}{6} ~ 6-1 ~ \log_{2}{32} ~ 5^{1}
5 ~ 5.\overline{0}1
""",
    ),
}


def pairs(rows: str) -> list[tuple[str, str]]:
    """Gold answers, each with an answer."""
    pairs = []
    lines = rows.strip().replace(" ~~ ", "\n").splitlines()
    for line in lines:
        gold, *answers = line.split(" ~ ")
        pairs += [(gold, answer) for answer in answers]
    return pairs
